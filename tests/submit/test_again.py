"""Experiments once more: a length that is too short by now, and what a fork of a colleague's cannot take along."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_det.config.secrets import MASK
from hpc_det.errors import UsageError
from hpc_det.node.json_files import append_line
from hpc_det.plan.effective import Effective
from hpc_det.requeue import Action, Cause
from hpc_det.submit.again import MaxLength, check_is_ones_own, check_max_length
from tests.cli.life import LENGTH, Life, random_search


def found(
    *, variables: list[str] | None = None, setup: tuple[str, ...] = (), data: Any = None, **searcher: Any
) -> Effective:
    environment = SimpleNamespace(variables=lambda slot_type: variables or [])
    return cast(
        Effective,
        SimpleNamespace(
            tree={"data": data or {}, "searcher": searcher},
            experiment=SimpleNamespace(environment=environment),
            cluster=SimpleNamespace(slot_type="cpu", setup=list(setup)),
        ),
    )


def problems(fork: Effective, **searcher: Any) -> list[str]:
    with pytest.raises(UsageError) as refused:
        check_is_ones_own(fork, {"searcher": searcher}, "ada")
    return refused.value.problems


def test_what_holds_no_secret_is_free() -> None:
    check_is_ones_own(found(variables=["A=1"], data={"url": "x"}), {"searcher": {}}, "ada")


def test_all_that_has_to_be_said_anew_is_told_at_once() -> None:
    fork = found(
        variables=["A=1", f"HF_TOKEN={MASK}"], setup=(MASK,), data={"secrets": {"user": MASK}}, source_trial_id="3/1"
    )
    assert problems(fork, source_trial_id="3/1") == [
        "data.secrets.user: a secret of ada's; give yours with --config data.secrets.user=VALUE",
        "environment.environment_variables: HF_TOKEN: secrets of ada's; give yours with --config "
        "'environment.environment_variables=[A=1, HF_TOKEN=VALUE]'",
        "cluster.setup: a line sets a secret of ada's; choose a profile that you may use with --cluster NAME",
        "searcher.source_trial_id: '3/1' is ada's; say one of yours, or null, with --config searcher.source_trial_id=",
    ]


def test_secrets_and_sources_of_ones_own_are_taken() -> None:
    fork = found(variables=[f"HF_TOKEN={MASK}", "HF_TOKEN=mine"], source_trial_id="5", source_checkpoint_uuid=None)
    check_is_ones_own(fork, {"searcher": {"source_trial_id": "3/1", "source_checkpoint_uuid": "u"}}, "ada")


EPOCHS: MaxLength = {"epochs": 4}
"""Of 100 batches: the reports of a Life say that all is 400."""


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Its only trial has reported at batch 150, and saved."""
    life = Life.submitted(tmp_path)
    life.begins()
    life.reports("validation", 150, {"accuracy": 0.9})
    life.saves(150)
    return life


def refusal(life: Life, before: MaxLength, now: MaxLength) -> str:
    with pytest.raises(UsageError) as caught:
        check_max_length(life.folder, before, now)
    return str(caught.value)


def test_fewer_batches_than_are_trained_are_refused(life: Life) -> None:
    assert refusal(life, {"batches": LENGTH}, {"batches": 149}) == (
        "--config searcher.max_length: {batches: 149}: trial 1/1 goes on from a checkpoint at 150 batches, and would "
        "train nothing; give at least 150, or start another experiment with "
        "`hpc-det experiment fork 1 --config searcher.max_length='{batches: 149}'`"
    )
    assert "a checkpoint at 150 batches" in refusal(life, EPOCHS, {"batches": 149})


def test_what_is_shorter_than_before_and_not_reached_yet_is_taken(life: Life) -> None:
    check_max_length(life.folder, {"batches": LENGTH}, {"batches": 150})
    check_max_length(life.folder, EPOCHS, {"epochs": 2})


def test_fewer_epochs_or_records_than_are_trained_are_refused(life: Life) -> None:
    assert "{epochs: 1}: trial 1/1 goes on from a checkpoint at 1.5 epochs" in refusal(life, EPOCHS, {"epochs": 1})
    records = refusal(life, {"records": 4 * LENGTH}, {"records": 599})
    assert "{records: 599}: trial 1/1 goes on from a checkpoint at 600 records" in records


def test_the_trial_that_has_come_furthest_is_named(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=3, **random_search(3))
    for worker, steps in enumerate((100, 300, 200)):
        life.begins(worker)
        life.saves(steps, trial=worker + 1)
    assert "trial 1/2 goes on from a checkpoint at 300" in refusal(life, {"batches": LENGTH}, {"batches": 150})


def test_reports_under_another_length_tell_nothing(life: Life) -> None:
    """It had four epochs when it reported, and five when it was continued."""
    life.ends(Cause.CANCELLED, Action.DONE, steps=150)
    life.journal.continued()
    check_max_length(life.folder, {"epochs": 5}, {"epochs": 1})
    life.journal.started(2, "4712", 0)
    append_line(life.trial.metrics, {"kind": "training", "steps": 200, "total": 500, "metrics": {}, "attempt": 2})
    life.saves(200)
    assert "a checkpoint at 2 epochs" in refusal(life, {"epochs": 5}, {"epochs": 1})


@pytest.mark.parametrize("now", [None, {"batches": 100}, {"epochs": 1}])
def test_nothing_is_compared_where_nothing_changes_or_nobody_knows(tmp_path: Path, now: MaxLength) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    check_max_length(life.folder, None, now)
    life.saves(150)
    check_max_length(life.folder, {"records": 300}, {"epochs": 1})
    check_max_length(life.folder, now, now)
