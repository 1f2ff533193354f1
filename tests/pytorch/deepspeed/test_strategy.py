"""The loop with engines: micro batches, metrics, hooks, data of several ranks, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from tests.distributed.ranks import OnRanks
from tests.facts import unnamed
from tests.pytorch.trials import StopAt

SHORT = {"searcher": {"max_length": {"batches": 4}}, "scheduling_unit": 2}


def lived(distributed: Distributed, folder: Path, name: str, hparams: dict[str, Any]) -> dict[str, Any]:
    """Run an attempt of the trial class with this name; return its recorded calls and metrics, or the error."""
    from tests.pytorch.deepspeed import noting
    from tests.pytorch.deepspeed.life import life_of

    trial_class = getattr(noting, name)
    trial_class.noted = []
    life = life_of(distributed, folder, trial_class, hparams, **SHORT)
    try:
        loop = life.attempt(StopAt(), distributed)
    except (UsageError, HpcDetError) as error:
        return {"said": str(error), "noted": trial_class.noted}
    files = sorted(path.name for path in (life.folder.checkpoints.glob("*/*")))
    return {"noted": trial_class.noted, "series": life.series, "end": loop.end, "files": files}


def noted(ranks: list[dict[str, Any]]) -> list[list[Any]]:
    assert not [rank["said"] for rank in ranks if "said" in rank]
    return [rank["noted"] for rank in ranks]


def said(ranks: list[dict[str, Any]]) -> str:
    """Return the error, which must be the same on all ranks."""
    (one,) = {rank["said"] for rank in ranks}
    return str(one)


def test_each_micro_batch_is_a_call_with_the_number_of_its_batch(on_ranks: OnRanks, tmp_path: Path) -> None:
    for rank in on_ranks(2, lived, tmp_path, "Noting", {"accumulation": 3}):
        calls = [note for note in rank["noted"] if note[0] == "train"]
        assert [number for _, number, _ in calls] == [batch for batch in range(4) for _ in range(3)]


def test_the_metrics_of_a_batch_are_the_means_of_its_micro_batches(on_ranks: OnRanks, tmp_path: Path) -> None:
    ranks = on_ranks(2, lived, tmp_path, "Noting", {"accumulation": 3})
    values = [[value for kind, _, value in rank["noted"] if kind == "train"] for rank in ranks]
    reported = [metrics for kind, _, metrics in ranks[0]["series"] if kind == "training"]
    for report, metrics in enumerate(reported):
        of_two_batches = [value for rank in values for value in rank[6 * report : 6 * report + 6]]
        assert metrics["value"] == pytest.approx(sum(of_two_batches) / 12, rel=1e-6)


def test_micro_batches_have_the_same_metrics(on_ranks: OnRanks, tmp_path: Path) -> None:
    refusal = said(on_ranks(1, lived, tmp_path, "ChangesNames", {"accumulation": 2}))
    assert unnamed(refusal, "train_batch: ", "micro batches", ["odd-1", "text", "value"]) == []


def test_a_trial_may_take_all_micro_batches_in_one_call(on_ranks: OnRanks, tmp_path: Path) -> None:
    for rank in on_ranks(2, lived, tmp_path, "ByHand", {"accumulation": 3}):
        assert [number for kind, number, _ in rank["noted"] if kind == "train"] == [0, 1, 2, 3]
        assert rank["end"] == "finished"


def test_what_is_not_trained_to_the_end_of_a_batch_is_named(on_ranks: OnRanks, tmp_path: Path) -> None:
    taken = said(on_ranks(2, lived, tmp_path / "1", "TakesOne", {"accumulation": 3}))
    assert unnamed(taken, "train_batch: batch 0", "1 micro batches", "dataloader_iter", 3) == []
    steps = said(on_ranks(2, lived, tmp_path / "2", "NeverSteps", {"accumulation": 3}))
    assert unnamed(steps, "train_batch: ", "batch 0", "micro batch 1 of 3", "gradient_accumulation_steps") == []
    never = said(on_ranks(2, lived, tmp_path / "3", "OnlyLooks", {}))
    assert unnamed(never, "train_batch: ", "engine.backward(loss)", "engine.step()") == []


def test_every_rank_has_its_own_hooks_and_callbacks(on_ranks: OnRanks, tmp_path: Path) -> None:
    ranks = on_ranks(2, lived, tmp_path, "Hooked", {})
    for notes in noted(ranks):
        hooks = Counter(kind for kind, *_ in notes)
        assert hooks["on_checkpoint_save_start"] == hooks["on_checkpoint_write_end"] >= 1
        (keys,) = {tuple(note[1]) for note in notes if note[0] == "on_checkpoint_save_start"}
        assert {"rng", "callbacks"} <= {*keys}
    assert {"added-0.txt", "added-1.txt"} <= {*ranks[0]["files"]}, "by on_checkpoint_write_end"


def test_two_engines_train_and_are_saved_each(on_ranks: OnRanks, tmp_path: Path) -> None:
    ranks = on_ranks(2, lived, tmp_path, "Two", {"stage": 1})
    assert {"model0", "model1", "engines.json", "rank-0.pth", "rank-1.pth"} <= set(ranks[0]["files"])
    assert ranks[0]["series"][-1][2].keys() == {"loss", "other"}


def test_in_zero_3_all_ranks_evaluate_equally_often(on_ranks: OnRanks, tmp_path: Path) -> None:
    """5 validation records in batches of 2: one rank has two batches; the other has one and evaluates it twice."""
    ranks = on_ranks(2, lived, tmp_path, "FewToValidate", {"stage": 3})
    counts = [Counter(kind for kind, *_ in notes)["evaluate"] for notes in noted(ranks)]
    assert counts[0] == counts[1]
    assert ranks[0]["series"][-1][2]["records"] == 5, "the reducer counts each record once"


def test_evaluating_the_full_dataset_is_for_engines_that_one_rank_can_use(on_ranks: OnRanks, tmp_path: Path) -> None:
    ranks = on_ranks(2, lived, tmp_path / "1", "InFull", {"stage": 1})
    assert ranks[0]["series"][-1][2] == {"loss": 26.0}
    refusal = said(on_ranks(2, lived, tmp_path / "2", "InFull", {"stage": 3}))
    assert unnamed(refusal, "InFull: ", "evaluate_full_dataset", "rank 0", "evaluate_batch") == []


def test_of_a_model_that_ranks_share_only_those_that_should_load_and_report(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Two ranks share one copy of the model, as a custom ModelParallelUnit defines."""
    ranks = on_ranks(2, lived, tmp_path, "Shared", {})
    assert [{note for note in rank["noted"] if note[0] == "loader"} for rank in ranks] == [
        {("loader", "training"), ("loader", "validation")},
        set(),
    ]
    assert {type_ for kind, type_ in ranks[1]["noted"] if kind == "iterator"} == {"NoneType"}
    assert {metrics["rank"] for _, _, metrics in ranks[0]["series"]} == {0.0}


def test_a_rank_that_reports_nothing_may_return_nothing(on_ranks: OnRanks, tmp_path: Path) -> None:
    ranks = on_ranks(2, lived, tmp_path, "ReportsNothing", {"accumulation": 2})
    assert [rank.get("end") for rank in ranks] == ["finished"] * 2
    assert {metrics["rank"] for _, _, metrics in ranks[0]["series"]} == {0.0}


def test_a_trial_may_return_none_where_others_load(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert [rank["end"] for rank in on_ranks(2, lived, tmp_path, "ReturnsNone", {})] == ["finished"] * 2


def test_batches_of_another_size_than_the_config_says_are_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    refusal = said(on_ranks(2, lived, tmp_path, "TooLarge", {"accumulation": 2}))
    facts = ["build_training_data_loader: ", "batch_size is 6", "train_micro_batch_size_per_gpu", 3]
    assert unnamed(refusal, *facts, "batch_size=context.get_train_micro_batch_size_per_gpu()") == []


def test_shards_on_the_disks_of_nodes_are_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    hparams = {"config": {"checkpoint": {"use_node_local_storage": True}}}
    refusal = said(on_ranks(1, lived, tmp_path, "Noting", hparams))
    assert unnamed(refusal, "deepspeed config: checkpoint.use_node_local_storage: ") == []


def test_none_on_all_ranks_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    refusal = said(on_ranks(2, lived, tmp_path, "NeverLoads", {}))
    assert unnamed(refusal, "build_training_data_loader: ", None) == []


def test_a_loader_of_the_users_own_is_taken_when_the_checks_are_off(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert [rank["end"] for rank in on_ranks(2, lived, tmp_path / "1", "OwnLoader", {})] == ["finished"] * 2
    refusal = said(on_ranks(2, lived, tmp_path / "2", "OwnLoaderUnasked", {}))
    facts = ["build_training_data_loader", "list", "hpc_det.pytorch.DataLoader"]
    assert unnamed(refusal, *facts, "context.disable_dataset_reproducibility_checks()") == []


def test_a_trial_without_an_engine_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert "context.wrap_model_engine" in said(on_ranks(1, lived, tmp_path, "NoEngine", {}))


def test_what_no_checkpoint_could_hold_is_named_before_the_first_batch(on_ranks: OnRanks, tmp_path: Path) -> None:
    (rank,) = on_ranks(1, lived, tmp_path, "NotSavable", {})
    assert unnamed(rank["said"], "model0.lr_scheduler.began: ", "datetime.date") == []
    assert not [note for note in rank["noted"] if note[0] == "train"]


@pytest.mark.parametrize("stage", [0, 1])
def test_what_an_engine_cannot_take_up_any_more_is_named(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    ranks = on_ranks(2, lived, tmp_path, "Thawed", {"stage": stage})
    if stage:
        assert unnamed(said(ranks), "batch 1", "2 parameters", "deepspeed.initialize") == []
    else:
        assert noted(ranks) == [[0, 1, 2, 3]] * 2, "without ZeRO the optimizer has them"
