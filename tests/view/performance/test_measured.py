"""The conditions of a trial's training, from its experiment's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import write_json
from hpc_det.view.performance.measured import Conditions, conditions
from hpc_det.view.state import ExperimentView
from tests.cli.life import Life
from tests.plan.plans import job_plan


def found(life: Life) -> Conditions:
    return conditions(ExperimentView(life.folder), life.trial)


@pytest.mark.parametrize(
    ("of_the_gang", "of_the_job", "of_a_node", "is_shared"),
    [(4, 4, 4, False), (4, 4, None, False), (2, 2, 8, True), (2, 8, 8, True)],
)
def test_a_job_with_a_part_of_each_node_or_several_trials_shares_them(
    tmp_path: Path, of_the_gang: int, of_the_job: int, of_a_node: int | None, is_shared: bool
) -> None:
    life = Life.submitted(tmp_path)
    plan = job_plan(folder=str(life.folder.path), ranks_per_node=of_the_gang, job_slots_per_node=of_the_job)
    write_atomic(life.folder.plan, plan.to_json())
    if of_a_node:
        write_json(life.folder.cluster, {"slots_per_node": of_a_node})
    assert found(life).shares_nodes is is_shared


def test_hyperparameters_are_those_that_the_trial_got(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    assert found(life).hparams == {}, "the trial has not begun"
    life.begins()
    assert found(life).hparams["width"] == 64


def test_a_value_that_the_configuration_does_not_have_is_the_default(tmp_path: Path) -> None:
    known = found(Life.submitted(tmp_path))
    assert known.value("searcher.metric", "loss") == "accuracy"
    assert known.value("optimizations.aggregation_frequency", 1) == 1
    assert known.value("name.of.nothing", 2) == 2
