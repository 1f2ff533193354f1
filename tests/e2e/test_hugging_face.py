"""The example with Hugging Face's Trainer in jobs on this machine: paused and activated, and in a search."""

from __future__ import annotations

import hashlib
import json

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.node.json_files import read_json
from hpc_det.search.journal import SearchJournal
from tests.e2e.gallery import EXAMPLES, begin, finished, tiny_model, values
from tests.e2e.story import Story, hpc_det

pytest.importorskip("transformers")
pytestmark = pytest.mark.long

PERIODS = ("eval_steps", "save_steps")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the override with the tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model"))


def weights(story: Story) -> str:
    newest = max(committed(story.trial.checkpoints), key=lambda checkpoint: checkpoint.steps)
    return hashlib.sha1((newest.path / "model.safetensors").read_bytes()).hexdigest()


def test_two_ranks_that_are_paused_and_activated_train_to_the_same_bits(model: str) -> None:
    options = (
        model,
        "searcher.max_length={batches: 200}",
        *(f"hyperparameters.trainer.{name}=100" for name in PERIODS),
    )
    whole = finished("hf_finetune", *options)
    losses = values(whole, "validation", "eval_loss")
    assert losses[-1] < losses[0] < 4
    paused = begin("hf_finetune", *options)
    paused.until_batch(20)
    hpc_det("experiment", "pause", paused.number)
    paused.until_ended(1)
    assert not committed_steps(paused) & {0, 200}
    hpc_det("experiment", "activate", paused.number)
    paused.wait()
    assert paused.causes == ["paused", "finished"]
    assert paused.series == whole.series
    assert weights(paused) == weights(whole)


def test_the_settings_for_two_nodes_train_the_tiny_model(model: str) -> None:
    """FSDP, bfloat16 and gradient checkpointing."""
    two, tiny = (load_yaml(EXAMPLES / "hf_finetune" / f"{name}.yaml") for name in ("two_nodes", "tiny"))
    trainers = [each["hyperparameters"]["trainer"] for each in (two, tiny)]
    merged = {**trainers[0], **trainers[1]}
    assert merged["fsdp"]
    story = finished("hf_finetune", model, f"hyperparameters.trainer={json.dumps(merged)}")
    losses = values(story, "validation", "eval_loss")
    assert losses[-1] < losses[0] < 4


def committed_steps(story: Story) -> set[int]:
    return {checkpoint.steps for checkpoint in committed(story.trial.checkpoints)}


def test_a_search_stops_trials_at_its_lengths_and_resumes_those_that_it_promotes(model: str) -> None:
    searcher = (
        "searcher={name: async_halving, metric: eval_loss, smaller_is_better: true, max_length: {batches: 16}, "
        "max_trials: 2, num_rungs: 2, divisor: 2, max_concurrent_trials: 1}"
    )
    rates = "hyperparameters.trainer.learning_rate={type: log, base: 10, minval: -5, maxval: -2}"
    story = finished("hf_finetune", model, searcher, rates, "resources.slots_per_trial=1")
    experiment = story.trial.experiment()
    state = SearchJournal(experiment).state()
    assert state.finished
    lengths = sorted(trial.length or 0 for trial in state.trials.values())
    assert lengths == [8, 16]
    (best,) = (number for number, trial in state.trials.items() if trial.length == 16)
    reports = Story(story.number, experiment.trial(best)).series
    assert [steps for kind, steps, _ in reports if kind == "training"] == [*range(1, 17)]
    assert [steps for kind, steps, _ in reports if kind == "validation"] == [8, 16]
    assert (read_json(experiment.trial(best).outcome) or {})["kind"] == "finished"
