"""Continued and forked experiments: lengths that are too short, and values that a fork of a colleague's lacks."""

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
from tests.facts import each_names, unnamed


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
    with pytest.raises(UsageError) as error:
        check_is_ones_own(fork, {"searcher": searcher}, "ada")
    return error.value.problems


def test_what_holds_no_secret_is_free() -> None:
    check_is_ones_own(found(variables=["A=1"], data={"url": "x"}), {"searcher": {}}, "ada")


def test_all_values_that_a_fork_must_give_again_are_named_at_once() -> None:
    fork = found(
        variables=["A=1", f"HF_TOKEN={MASK}"], setup=(MASK,), data={"secrets": {"user": MASK}}, source_trial_id="3/1"
    )
    variables = "--config 'environment.environment_variables=[A=1, HF_TOKEN=VALUE]'"
    each_names(
        problems(fork, source_trial_id="3/1"),
        ["data.secrets.user", "ada", "--config data.secrets.user=VALUE"],
        ["environment.environment_variables", "HF_TOKEN", "ada", variables],
        ["cluster.setup", "ada", "--cluster NAME"],
        ["searcher.source_trial_id", "'3/1'", "ada", "--config searcher.source_trial_id="],
    )


def test_secrets_and_sources_of_ones_own_are_taken() -> None:
    fork = found(variables=[f"HF_TOKEN={MASK}", "HF_TOKEN=mine"], source_trial_id="5", source_checkpoint_uuid=None)
    check_is_ones_own(fork, {"searcher": {"source_trial_id": "3/1", "source_checkpoint_uuid": "u"}}, "ada")


EPOCHS: MaxLength = {"epochs": 4}
"""Four epochs of 100 batches: a Life reports a total of 400."""


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Return an experiment whose only trial has reported and saved at batch 150."""
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
    command = "`hpc-det experiment fork 1 --config searcher.max_length='{batches: 149}'`"
    facts = ["--config searcher.max_length", "{batches: 149}", "trial 1/1", "150 batches", command]
    assert not unnamed(refusal(life, {"batches": LENGTH}, {"batches": 149}), *facts)
    assert not unnamed(refusal(life, EPOCHS, {"batches": 149}), "150 batches")


def test_what_is_shorter_than_before_and_not_reached_yet_is_taken(life: Life) -> None:
    check_max_length(life.folder, {"batches": LENGTH}, {"batches": 150})
    check_max_length(life.folder, EPOCHS, {"epochs": 2})


def test_fewer_epochs_or_records_than_are_trained_are_refused(life: Life) -> None:
    assert not unnamed(refusal(life, EPOCHS, {"epochs": 1}), "{epochs: 1}", "trial 1/1", "1.5 epochs")
    records = refusal(life, {"records": 4 * LENGTH}, {"records": 599})
    assert not unnamed(records, "{records: 599}", "trial 1/1", "600 records")


def test_the_trial_that_has_come_furthest_is_named(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=3, **random_search(3))
    for worker, steps in enumerate((100, 300, 200)):
        life.begins(worker)
        life.saves(steps, trial=worker + 1)
    assert not unnamed(refusal(life, {"batches": LENGTH}, {"batches": 150}), "trial 1/2", 300)


def test_reports_under_another_length_tell_nothing(life: Life) -> None:
    """The experiment had four epochs when it reported, and five when it was continued."""
    life.ends(Cause.CANCELLED, Action.DONE, steps=150)
    life.journal.continued()
    check_max_length(life.folder, {"epochs": 5}, {"epochs": 1})
    life.journal.started(2, "4712", 0)
    append_line(life.trial.metrics, {"kind": "training", "steps": 200, "total": 500, "metrics": {}, "attempt": 2})
    life.saves(200)
    assert not unnamed(refusal(life, {"epochs": 5}, {"epochs": 1}), "2 epochs")


@pytest.mark.parametrize("now", [None, {"batches": 100}, {"epochs": 1}])
def test_nothing_is_compared_where_nothing_changes_or_nobody_knows(tmp_path: Path, now: MaxLength) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    check_max_length(life.folder, None, now)
    life.saves(150)
    check_max_length(life.folder, {"records": 300}, {"epochs": 1})
    check_max_length(life.folder, now, now)
