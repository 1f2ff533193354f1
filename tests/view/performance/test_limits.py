"""Bottlenecks of training, from the profiles of ranks and nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder
from hpc_det.store.save_times import write_save
from hpc_det.view.performance.limits import NOTICEABLE, Kind, Verdict, limits, verdicts
from hpc_det.view.performance.measured import Conditions, measured
from hpc_det.view.performance.profile import recorded
from tests.checkpoint.saved import save
from tests.facts import each_names, unnamed
from tests.view.performance.profiles import BEGAN, gpus, sample, stretch

CONDITIONS = Conditions(
    config={"profiling": {"enabled": True}},
    hparams={"global_batch_size": 32},
    slots=1,
    nodes=1,
    scheduler="slurm",
    cpus_per_rank=6,
    shares_nodes=False,
)


def judged(trial: TrialFolder) -> list[Verdict]:
    return verdicts(measured(trial))


def explained(trial: TrialFolder, **changes: Any) -> dict[str, Any]:
    return recorded(measured(trial), Conditions(**{**vars(CONDITIONS), **changes}))


@pytest.mark.parametrize(
    ("seconds", "kind", "share"),
    [
        ({}, Kind.WELL_USED, 0.94),
        ({"dataloader_next": 6.2, "train_batch": 3.4}, Kind.DATA_LOADER, 0.62),
        ({"to_device": 2.0, "from_device": 1.0, "train_batch": 6.0}, Kind.COPY, 0.3),
        ({"validation": 4.0, "train_batch": 5.0}, Kind.VALIDATION, 0.4),
        ({"checkpoint": 2.5, "train_batch": 7.0}, Kind.CHECKPOINT, 0.25),
        ({"callbacks.Log.on_batch_end": 1.5, "train_batch": 8.0}, Kind.CALLBACKS, 0.15),
        ({"train_batch": 6.0}, Kind.LOOP, 0.36),
    ],
)
def test_what_takes_a_noticeable_share_of_the_time_is_the_bound(
    trial: TrialFolder, seconds: dict[str, float], kind: Kind, share: float
) -> None:
    stretch(trial, seconds=seconds)
    (verdict,) = judged(trial)
    assert (verdict.kind, verdict.rank) == (kind, None)
    assert verdict.share == pytest.approx(share)


def test_of_several_bounds_the_greatest_is_first(trial: TrialFolder) -> None:
    stretch(trial, seconds={"dataloader_next": 1.5, "checkpoint": 3.0, "train_batch": 5.0})
    assert [verdict.kind for verdict in judged(trial)] == [Kind.CHECKPOINT, Kind.DATA_LOADER]


def test_gradients_that_computing_does_not_hide_are_communication(trial: TrialFolder) -> None:
    for rank in (0, 1):
        stretch(trial, rank, exposed_s=3.0, seconds={"reduce_metrics": 0.5, "train_batch": 9.0})
    (verdict,) = judged(trial)
    assert (verdict.kind, verdict.rank) == (Kind.COMMUNICATION, None)
    assert verdict.share == pytest.approx(0.34, abs=0.02)


def test_one_rank_has_nobody_to_communicate_with(trial: TrialFolder) -> None:
    stretch(trial, seconds={"reduce_metrics": 3.0, "train_batch": 6.5})
    assert [verdict.kind for verdict in judged(trial)] == [Kind.WELL_USED]


def test_waiting_for_one_ranks_data_loader_is_no_communication(trial: TrialFolder) -> None:
    for rank in (0, 1, 3):
        stretch(trial, rank, exposed_s=5.6)
    stretch(trial, 2, host="n2", exposed_s=0.3, seconds={"dataloader_next": 5.5, "train_batch": 4.1})
    (verdict,) = judged(trial)
    assert verdict.kind is Kind.DATA_LOADER
    assert verdict.share == pytest.approx(0.55)
    assert verdict.rank is not None
    assert (verdict.rank.rank, verdict.rank.host) == (2, "n2")
    assert not unnamed(explained(trial)["why"], "55%", "rank 2 on n2", "53%")


def test_where_waiting_is_not_measured_it_is_seen_by_the_rank_that_computes_least(trial: TrialFolder) -> None:
    for rank in (0, 1):
        stretch(trial, rank)
    stretch(trial, 2, host="n2", seconds={"dataloader_next": 5.5, "train_batch": 4.1})
    (verdict,) = judged(trial)
    assert verdict.kind is Kind.DATA_LOADER
    assert verdict.rank is not None
    assert verdict.rank.host == "n2"


def test_a_rank_that_computes_longer_than_all_others_is_named(trial: TrialFolder) -> None:
    for rank in (0, 1, 2):
        stretch(trial, rank, exposed_s=3.2)
    stretch(trial, 3, host="n2", exposed_s=0.2)
    (verdict,) = judged(trial)
    assert verdict.kind is Kind.SLOW_RANK
    assert verdict.share == pytest.approx(0.3, abs=0.02)
    assert not unnamed(explained(trial)["why"], "30%", "rank 3 on n2")


def test_ranks_that_wait_about_the_same_time_are_not_told_apart(trial: TrialFolder) -> None:
    for rank in range(4):
        stretch(trial, rank, exposed_s=2.0 + rank / 10)
    (verdict,) = judged(trial)
    assert (verdict.kind, verdict.rank) == (Kind.COMMUNICATION, None)


def test_gpus_that_idle_while_training_runs_are_a_verdict(trial: TrialFolder) -> None:
    stretch(trial)
    for at in range(5):
        sample(trial, at=at, gpus=gpus(a=30.0))
    (verdict,) = judged(trial)
    assert verdict.kind is Kind.IDLE_GPUS
    assert verdict.share == pytest.approx(0.65)
    (first, *_) = explained(trial)["advice"]
    assert not unnamed(first["text"], "20.0 GiB")
    assert first["setting"] == "hyperparameters.global_batch_size: 64"


def test_gpus_that_idle_because_the_data_is_late_are_no_verdict_of_their_own(trial: TrialFolder) -> None:
    stretch(trial, seconds={"dataloader_next": 6.2, "train_batch": 3.4})
    sample(trial, at=1, gpus=gpus(a=30.0))
    assert [verdict.kind for verdict in judged(trial)] == [Kind.DATA_LOADER]


def test_gpus_of_a_node_that_the_trial_does_not_have_do_not_count(trial: TrialFolder) -> None:
    stretch(trial)
    sample(trial, at=1, gpus=gpus(a=0.0, b=95.0, c=0.0))
    assert [verdict.kind for verdict in judged(trial)] == [Kind.WELL_USED]


def test_a_trial_that_was_not_profiled_is_told_how_to_be(trial: TrialFolder) -> None:
    found = explained(trial, config={})
    assert (found["verdict"], found["share"], found["timings"], found["nodes"]) == ("not measured", None, [], [])
    assert [each["setting"] for each in found["advice"]] == ["profiling.enabled: true"]


def test_a_few_batches_are_too_few(trial: TrialFolder) -> None:
    stretch(trial, batches=5, count=5, seconds={"dataloader_next": 6.2, "train_batch": 3.4})
    found = explained(trial)
    assert (found["verdict"], unnamed(found["why"], "5 batches", 20)) == ("not measured", [])


def _trains_without_a_profile(trial: TrialFolder) -> None:
    """Write the metrics of 100 batches in 40 s, of which it validates for 10 s and saves for 20 s."""
    lines: list[dict[str, Any]] = [
        {"kind": "begins", "trained": 0, "validated": 0, "time": BEGAN},
        {"kind": "validation", "steps": 100, "metrics": {}, "seconds": 10.0, "time": BEGAN + 20},
    ]
    for line in lines:
        append_line(trial.metrics, {"attempt": 1, **line}, durable=False)
    write_save(trial.saves, save(stall_s=20.0, began=BEGAN + 20))


def test_saves_and_validations_tell_of_themselves_without_a_profile(trial: TrialFolder) -> None:
    _trains_without_a_profile(trial)
    assert [(verdict.kind, verdict.share) for verdict in judged(trial)] == [
        (Kind.CHECKPOINT, 0.5),
        (Kind.VALIDATION, 0.25),
    ]
    found = explained(trial, config={"checkpoint_policy": "all"})
    assert not unnamed(found["why"], "50%", "checkpoints", "1 save", "20.0 s")
    settings = [its["setting"] for its in found["advice"]]
    assert settings[:2] == ["checkpoint_policy: best", "checkpoint_interval: auto"]
    assert settings[2] == "min_checkpoint_period: {batches: 3800}", "5 % of the time, at 0.1 s a batch"


def test_saves_that_came_too_late_are_counted(trial: TrialFolder) -> None:
    _trains_without_a_profile(trial)
    assert not explained(trial)["notes"]
    write_save(trial.saves, replace(save(began=BEGAN + 60), postponed=True))
    (note,) = explained(trial)["notes"]
    assert not unnamed(note, "1 of 2 saves")


def test_ranks_without_a_file_are_named(trial: TrialFolder) -> None:
    for rank in (0, 2):
        stretch(trial, rank, exposed_s=0.1)
    each_names(explained(trial, slots=4)["notes"], ["2 of 4 ranks", "1, 3"])
    (note,) = explained(trial, slots=10**15)["notes"]
    assert not unnamed(note, "1, 3, 4, 5, 6, 7, 8, 9 and more")


def test_what_makes_the_numbers_less_reliable_is_reported(trial: TrialFolder) -> None:
    for rank in (0, 1):
        stretch(trial, rank)
    sample(trial, at=1, gpus=gpus(a=95.0, b=95.0))
    notes = explained(trial, slots=2, shares_nodes=True, config={"profiling": {"sync_timings": False}})["notes"]
    each_names(notes, ["optimizations.aggregation_frequency"], ["profiling.sync_timings"], ["whole nodes"])


def test_one_rule_says_what_is_a_limit_whoever_measured_the_shares() -> None:
    data, network = Verdict(kind=Kind.DATA_LOADER, share=0.2), Verdict(kind=Kind.COMMUNICATION, share=0.5)
    small = Verdict(kind=Kind.COPY, share=NOTICEABLE / 2)
    assert limits([data, small, network]) == [network, data]
    assert limits([data, small, network], noise=0.3) == [network]
