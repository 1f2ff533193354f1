"""Hugging Face's Trainer on hpc_det: a run that was stopped and resumed equals a whole one to the bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from tests.facts import unnamed
from tests.integrations.compared import Compared, series
from tests.integrations.forked import ForkedRuns

pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

SCRIPT = "tests.integrations.hf_script"
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    runs = ForkedRuns(SCRIPT)
    yield runs
    runs.close()


# --- the same bits


@pytest.mark.parametrize(
    ("stop_at", "ranks", "options"),
    [
        pytest.param(8, 1, {}, id="dropout"),
        pytest.param(8, 1, {"dataloader_num_workers": 2}, id="2 workers", marks=pytest.mark.long),
        pytest.param(
            8,
            1,
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
            id="accumulation of 2 batches",
            marks=pytest.mark.long,
        ),
        pytest.param(8, 2, {}, id="2 ranks"),
        pytest.param(6, 1, {"noise": 0.1}, id="the end of a pass with random records"),
        pytest.param(3, 1, {"data": "stream", "max_steps": 6}, id="a stream in its first pass", marks=pytest.mark.long),
        pytest.param(6, 1, {"data": "stream", "max_steps": 9}, id="a stream at the end of its first pass"),
        pytest.param(
            8, 1, {"eval_strategy": "steps", "eval_steps": 4}, id="a step with an evaluation", marks=pytest.mark.long
        ),
        pytest.param(12, 1, {**EPOCHS, "logging_strategy": "steps"}, id="the end of a pass with an evaluation"),
    ],
)
def test_a_stopped_and_resumed_run_equals_a_whole_one(
    runs: ForkedRuns, tmp_path: Path, stop_at: int, ranks: int, options: dict[str, Any]
) -> None:
    compared = Compared(runs, SCRIPT, tmp_path, stop_at, options, ranks)
    compared.assert_same(stop_at)
    whole, stopped = compared.series
    assert stopped == whole
    assert {kind for kind, _, _ in whole} == {"training", *(["validation"] if "eval_strategy" in options else [])}


def test_a_stop_in_a_pass_neither_evaluates_nor_saves_a_second_time(runs: ForkedRuns, tmp_path: Path) -> None:
    compared = Compared(runs, SCRIPT, tmp_path, 8, EPOCHS)
    compared.assert_same(8)
    validations = [
        [(steps, metrics) for kind, steps, metrics in each if kind == "validation"] for each in compared.series
    ]
    assert [steps for steps, _ in validations[0]] == [6, 12, 18]
    assert validations[0] == validations[1]
    logged = [[steps for kind, steps, _ in each if kind == "training"] for each in compared.series]
    assert logged == [[6, 12, 18]] * 2
    assert compared.checkpoints == {6, 8}


def test_a_stop_before_the_first_step_is_a_stop(runs: ForkedRuns, tmp_path: Path) -> None:
    results, codes, log = runs.run(SCRIPT, tmp_path, "first", stop_at=-1)
    assert (results, codes) == ([], [0])
    assert unnamed(log, "stopped", "preempted") == []
    trial = tmp_path / "experiments" / "1" / "trials" / "1"
    assert json.loads((trial / "outcome.json").read_text())["kind"] == "stopped"
    (resumed,), codes, log = runs.run(SCRIPT, tmp_path, "second")
    assert (codes, resumed["step"]) == ([0], 18), log


# --- what cannot be the same


def test_random_records_differ_in_an_open_pass(runs: ForkedRuns, tmp_path: Path) -> None:
    compared = Compared(runs, SCRIPT, tmp_path, 8, {"noise": 0.1})
    (whole,), (resumed,) = compared.whole, compared.resumed
    assert resumed["step"] == whole["step"]
    assert resumed["weights"] != whole["weights"]


def test_a_stream_after_its_first_pass_begins_again_and_this_is_noted(runs: ForkedRuns, tmp_path: Path) -> None:
    compared = Compared(runs, SCRIPT, tmp_path, 8, {"data": "stream", "max_steps": 12})
    assert compared.resumed[0]["seen"][0] == compared.whole[0]["seen"][0]
    assert unnamed(compared.log, "IterableDataset") == []


def test_another_number_of_ranks_is_noted(runs: ForkedRuns, tmp_path: Path) -> None:
    runs.run(SCRIPT, tmp_path, "first", 2, stop_at=8)
    (resumed,), codes, log = runs.run(SCRIPT, tmp_path, "second", per_device_train_batch_size=8)
    assert (codes, resumed["step"]) == ([0], 18)
    assert "2 ranks, here are 1" in log


# --- what is refused


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_jit_checkpoint": True}, ["enable_jit_checkpoint"]),
        ({"save_only_model": True}, ["TrainingArguments.save_only_model"]),
        ({"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch"}, ["save_strategy"]),
        ({"config": {"searcher": {"max_length": {"batches": 7}}}, "max_steps": 5}, ["searcher.max_length", "7", "5"]),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "config": {"searcher": {"metric": "eval_loss", "smaller_is_better": False}},
            },
            ["load_best_model_at_end", "searcher.metric", "eval_loss", "smaller_is_better"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_arguments_with_which_a_resume_fails_are_refused(
    runs: ForkedRuns, tmp_path: Path, options: dict[str, Any], named: list[str]
) -> None:
    results, codes, log = runs.run(SCRIPT, tmp_path, "refused", **options)
    assert (results, codes) == ([], [1])
    assert unnamed(log, "UsageError", *named) == []


def test_ranks_that_the_trainer_does_not_see_are_refused(runs: ForkedRuns, tmp_path: Path) -> None:
    """On nodes without a GPU it ignores the other ranks unless `use_cpu` is set."""
    results, codes, log = runs.run(SCRIPT, tmp_path, "refused", 2, use_cpu=False)
    assert (results, codes) == ([], [1, 1])
    assert unnamed(log, "UsageError", "1 rank", "use_cpu") == []


def test_a_training_that_does_not_resume_from_the_newest_checkpoint_is_refused(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    runs.run(SCRIPT, tmp_path, "first", stop_at=8)
    results, codes, log = runs.run(SCRIPT, tmp_path, "second", resumes=False)
    assert (results, codes) == ([], [1])
    assert unnamed(log, "UsageError", "step 0", "step 8", "resume_from_checkpoint") == []


# --- the end, and the best checkpoint


@pytest.mark.parametrize(
    "options", [{"max_steps": 8}, {"data": "stream", "max_steps": 6}], ids=["in a pass", "a stream"]
)
def test_a_complete_training_is_not_continued(runs: ForkedRuns, tmp_path: Path, options: dict[str, Any]) -> None:
    """The Trainer itself would train another step."""
    options = {**options, "save_strategy": "steps", "fails": True}
    _, codes, _ = runs.run(SCRIPT, tmp_path, "first", **options)
    assert codes == [1]  # after the last checkpoint
    results, codes, _ = runs.run(SCRIPT, tmp_path, "second", **options)
    assert (results, codes) == ([], [0])
    trial = tmp_path / "experiments" / "1" / "trials" / "1"
    assert {each.steps for each in committed(trial / "checkpoints")} == {options["max_steps"]}
    assert json.loads((trial / "outcome.json").read_text())["kind"] == "finished"


def test_code_after_a_training_that_was_complete_at_the_end_of_a_pass_runs_again(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    _, codes, _ = runs.run(SCRIPT, tmp_path, "first", save_strategy="epoch", fails=True)
    assert codes == [1]
    (result,), codes, _ = runs.run(SCRIPT, tmp_path, "second", save_strategy="epoch")
    assert (result["step"], result["seen"], codes) == (18, [], [0])


def test_the_best_model_is_loaded_at_the_end_although_its_checkpoint_has_moved(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # so that it is an early one
        "config": {"searcher": {"metric": "eval_loss", "smaller_is_better": False}},
    }
    compared = Compared(runs, SCRIPT, tmp_path, 14, options)
    (whole,), (resumed,) = compared.whole, compared.resumed
    assert resumed["weights"] == whole["weights"]
    losses = {steps: metrics["eval_loss"] for kind, steps, metrics in compared.series[1] if kind == "validation"}
    best = max(losses, key=lambda steps: losses[steps])
    assert best < 12
    assert json.loads(Path(resumed["best"], "trainer_state.json").read_text())["global_step"] == best
    assert Path(resumed["best"]).parent == Path(resumed["folder"], "checkpoints")


# --- files of a checkpoint


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_has_no_file_that_an_earlier_attempt_did_not_commit(
    runs: ForkedRuns, tmp_path: Path, links: bool
) -> None:
    (first,), _, _ = runs.run(SCRIPT, tmp_path, "first", stop_at=8, links=links)
    torn = Path(first["folder"], "trainer", "checkpoint-12")
    torn.mkdir()
    (torn / "rng_state_7.pth").write_bytes(b"of a rank that is gone")
    (second,), _, log = runs.run(SCRIPT, tmp_path, "second", stop_at=12, links=links)
    assert second["stop"] == "preempted", log
    saved = {each.steps: each.path for each in committed(Path(first["folder"], "checkpoints"))}
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"} <= set(os.listdir(saved[12]))
    assert not (saved[12] / "rng_state_7.pth").exists()
    assert not torn.exists()
    (third,), _, log = runs.run(SCRIPT, tmp_path, "third", links=links)
    assert third["step"] == 18, log


# --- searches


def searched(unit: str, amount: int) -> dict[str, Any]:
    return {"config": {"searcher": {"metric": "eval_loss", "max_length": {unit: amount}}}, "dropout": 0.2}


@pytest.mark.parametrize(
    ("options", "lengths", "pauses_at", "steps"),
    [
        (searched("batches", 16), [4, 9, 16], 9, [4, 9, 16]),
        ({**searched("epochs", 3), **EPOCHS}, [1, 3], 1, [6, 12, 18]),
        ({**searched("epochs", 3), "eval_strategy": "steps", "eval_steps": 9}, [1, 3], 1, [6, 9, 18]),
    ],
    ids=["batches", "epochs", "epochs, evaluated by steps"],
)
def test_a_search_pauses_a_trial_at_a_length_and_resumes_it_to_the_same_bits(
    runs: ForkedRuns, tmp_path: Path, options: dict[str, Any], lengths: list[int], pauses_at: int, steps: list[int]
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 100, **options}
    (whole,), _, log = runs.run(SCRIPT, tmp_path / "whole", "whole", lengths=lengths, **options)
    root = tmp_path / "paused"
    (paused,), _, _ = runs.run(SCRIPT, root, "first", lengths=lengths, pauses_at=pauses_at, **options)
    assert paused["stop"] == "search"
    assert outcome(paused) == "waiting"
    (resumed,), _, log = runs.run(SCRIPT, root, "second", lengths=lengths, **options)
    assert paused["seen"] + resumed["seen"] == whole["seen"], log
    assert resumed["weights"] == whole["weights"]
    assert series(resumed["folder"]) == series(whole["folder"])
    validations = {at: metrics for kind, at, metrics in series(whole["folder"]) if kind == "validation"}
    assert [*validations] == steps
    reported = json.loads((root / "reported.json").read_text())
    assert [length for length, _ in reported] == lengths
    assert {value for _, value in reported} <= {metrics["eval_loss"] for metrics in validations.values()}
    assert outcome(resumed) == "finished"


def outcome(result: dict[str, Any]) -> str:
    return str(json.loads(Path(result["folder"], "outcome.json").read_text())["kind"])


def test_a_trial_that_its_search_does_not_continue_trains_no_step(runs: ForkedRuns, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 100, **searched("batches", 16)}
    (paused,), _, _ = runs.run(SCRIPT, tmp_path, "first", lengths=[4, 16], pauses_at=4, **options)
    results, codes, _ = runs.run(SCRIPT, tmp_path, "second", lengths=[4], **options)
    assert (results, codes) == ([], [0])
    assert outcome(paused) == "finished"
    assert max(steps for _, steps, _ in series(paused["folder"])) == 4
