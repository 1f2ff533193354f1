"""The examples to start from, on two ranks and tiny data. Their pages are followed in tests/docs/test_pages.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.content import load
from hpc_det.search.journal import SearchJournal
from tests.e2e.gallery import EXAMPLES, finished, tiny_model, values
from tests.e2e.story import Story, warm_ranks_of
from tests.e2e.test_verify_resume import verified
from tests.facts import unnamed

pytestmark = pytest.mark.usefixtures("warm")


def images(folder: Path) -> str:
    """Write the images for resnet50 into `folder` and return the override with it."""
    subprocess.run([sys.executable, EXAMPLES / "resnet50" / "make_images.py", folder], check=True)
    return f"data.folder={folder}"


def newest(story: Story) -> Path:
    return max(committed(story.trial.checkpoints), key=lambda checkpoint: checkpoint.steps).path


def test_a_residual_network_learns_to_tell_colours_apart(tmp_path: Path) -> None:
    story = finished("resnet50", images(tmp_path / "images"), warm_ranks_of("ImageNetTrial"))
    assert values(story, "validation", "top1")[-1] > 0.9
    losses = values(story, "validation", "validation_loss")
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2


def test_it_is_resnet_50_at_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "resnet50"))
    from resnet import ResNet  # type: ignore[import-not-found]

    model = ResNet(1000, [3, 4, 6, 3])
    assert sum(weight.numel() for weight in model.parameters()) == 25_557_032  # as torchvision's resnet50


@pytest.mark.long
def test_a_diffusion_model_learns_and_its_average_generates_images() -> None:
    story = finished("diffusion", warm_ranks_of("DiffusionTrial"))
    losses = values(story, "validation", "validation_loss")
    assert losses[-1] < losses[0] < 1  # 1: the loss of a model that predicts no noise
    events = EventAccumulator(str(story.trial.tensorboard)).Reload()
    (tag,) = events.Tags()["images"]
    assert [image.step for image in events.Images(tag)] == [50, 100]
    average, trained = load(newest(story) / "state_dict.pth")["models_state_dict"]
    assert average.keys() == trained.keys()
    assert not torch.equal(average["enter.weight"], trained["enter.weight"])


@pytest.mark.long
def test_asha_trains_a_hydra_app_and_ends_all_trials_but_the_best_early() -> None:
    story = finished("hydra_asha", "resources.slots_per_trial=1")
    state = SearchJournal(story.trial.experiment()).state()
    assert sorted(trial.length or 0 for trial in state.trials.values()) == [1, 1, 1, 4]
    best = max(story.describe()["trials"], key=lambda trial: trial["best"]["value"])
    assert state.trials[best["id"]].length == 4
    assert best["best"]["value"] > 0.8
    assert best["hyperparameters"].keys() == {"width", "dropout", "optimizer"}


class TiedModel(torch.nn.Module):
    """A model whose scores have the weights of its embedding, as in many small language models."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(8, 4)
        self.q_proj = torch.nn.Linear(4, 4)
        self.lm_head = torch.nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.tokens.weight


@pytest.mark.parametrize(
    ("layers", "facts"),
    [(["q_proj", "query"], ["query", "lm_head", "q_proj"]), (["lm_head"], ["lm_head", "shares"])],
)
def test_lora_refuses_layers_that_it_cannot_adapt(
    monkeypatch: pytest.MonkeyPatch, layers: list[str], facts: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "lora"))
    from lora import adapt  # type: ignore[import-not-found]

    adapt(TiedModel(), ["q_proj"], 2, 1.0)
    with pytest.raises(ValueError, match="layers: ") as refused:
        adapt(TiedModel(), layers, 2, 1.0)
    assert unnamed(str(refused.value), *facts) == []


# --- with transformers


@pytest.mark.long
def test_checkpoints_of_lora_have_the_adapters_alone_and_merge_into_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    safetensors: Any = pytest.importorskip("safetensors.torch")
    model = tiny_model(tmp_path / "model")
    story = finished("lora", model, warm_ranks_of("LoraTrial"))
    losses = values(story, "validation", "validation_loss")
    assert losses[-1] < losses[0]
    (weights,) = load(newest(story) / "state_dict.pth")["models_state_dict"]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in weights} == {"down", "up"}
    merge: list[str | Path] = [sys.executable, EXAMPLES / "lora" / "merge.py", newest(story), tmp_path / "merged"]
    subprocess.run(merge, check=True, capture_output=True)
    original, merged = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("model", "merged"))
    assert merged.keys() == original.keys()
    changed = {
        name.split(".")[-2]
        for name, weight in original.items()
        if (merged[name].float() - weight).abs().max() > 0.02  # more than the rounding to bfloat16
    }
    assert changed == {"q_proj", "v_proj", "up_proj", "lm_head"}


# --- resumes


@pytest.mark.long
@pytest.mark.parametrize("example", ["resnet50", "diffusion", "lora"])
def test_an_example_is_the_same_to_the_bit_after_stops(example: str, tmp_path: Path) -> None:
    given = {
        "resnet50": lambda: [warm_ranks_of("ImageNetTrial"), images(tmp_path / "images")],
        "diffusion": lambda: [warm_ranks_of("DiffusionTrial")],
        "lora": lambda: [warm_ranks_of("LoraTrial"), tiny_model(tmp_path / "model")],
    }
    options = [word for override in given[example]() for word in ("--config", override)]
    folder = EXAMPLES / example
    code, found = verified("--batches", 12, "--ranks", 2, *options, config=folder / "tiny.yaml", code=folder)
    assert code == 0
    assert found["causes"] == []
