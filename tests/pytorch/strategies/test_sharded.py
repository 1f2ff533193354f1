"""Models that fully_shard has distributed over the ranks: training, validation, saving, and resumes by any gang."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.rank_files import RankFiles
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch import PyTorchTrialContext, load_trial_from_checkpoint_path
from hpc_det.pytorch.strategies.pytorch_strategy import PyTorchStrategy
from tests.distributed.ranks import OnRanks
from tests.facts import each_names, refused
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same, differences

AGGREGATED: dict[str, Any] = {"optimizations": {"aggregation_frequency": 2}}


class Seen(nn.Module):
    """A layer without effect, with a buffer that differs between ranks."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().float().mean(), 0.1)
        return inputs


class Sharded(Tiny):
    """Three ranks share the rows of its layers unevenly; the last layer has only one row, on the first rank."""

    last: ClassVar[Sharded]

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.prepare()
        model = nn.Sequential(nn.Linear(5, 8), Seen(), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        model[2].eval()
        if context.distributed.size > 1:
            self.shard(model)
        self.model: nn.Module = context.wrap_model(model)
        self.optimizer: torch.optim.Optimizer = context.wrap_optimizer(
            torch.optim.AdamW(model.parameters(), lr=self.rate)
        )
        self.wrap_schedulers(context)
        Sharded.last = self

    def prepare(self) -> None:
        """Override to change the context before the model is wrapped."""

    def shard(self, model: nn.Sequential) -> None:
        fully_shard(model[0])
        fully_shard(model)


class InDdp(Sharded):
    def shard(self, model: nn.Sequential) -> None:
        """Do not shard the model."""


def begin(path: Path, trial_class: type[Tiny] = Sharded, **config: Any) -> Life:
    return Life.begin(path, trial_class, {"global_batch_size": 6}, **config)


def attempts(distributed: Distributed, *lives: tuple[Life, float]) -> list[tuple[int, str]]:
    """Run each trial until its tick; return the batch from which it started, and how the attempt ended."""
    ends = [(life.attempt(StopAt(tick), distributed).end, Sharded.last) for life, tick in lives]
    return [(trial.context.get_initial_batch(), end) for end, trial in ends]


def test_a_resume_is_exact_to_the_bit_and_a_damaged_shard_is_found(on_ranks: OnRanks, tmp_path: Path) -> None:
    """The stop is between two batches of one optimizer step, so that accumulated gradients must be saved too."""
    undisturbed, life = (begin(tmp_path / name, **AGGREGATED) for name in ("undisturbed", "stopped"))
    assert on_ranks(2, attempts, (undisturbed, math.inf), (life, 10)) == [[(0, "finished"), (0, "stopped")]] * 2
    newest, older, *_ = committed(life.folder.checkpoints)
    assert (newest.steps, older.steps) == (7, 5), "gradients wait"
    shutil.copytree(tmp_path / "stopped", tmp_path / "damaged")
    damaged = begin_again(life, tmp_path / "damaged")
    shard = damaged.folder.checkpoints / newest.uuid / "shard-1.pth"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert on_ranks(2, attempts, (life, math.inf), (damaged, math.inf)) == [[(7, "finished"), (5, "finished")]] * 2
    assert_same(life, undisturbed)
    assert_same(damaged, undisturbed)
    for rank in (0, 1):
        offsets = [shard["offset"][0] for shard in undisturbed.newest[f"shard-{rank}.pth"].values()]
        assert set(offsets) == {rank * 4, rank}, "each rank has different rows"


def test_a_resume_on_two_nodes_is_exact_to_the_bit_and_finds_its_parts_on_one_node(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    undisturbed, life = (begin(tmp_path / name, **AGGREGATED) for name in ("undisturbed", "stopped"))
    assert (
        on_ranks(2, attempts, (undisturbed, math.inf), (life, 10), nodes=2) == [[(0, "finished"), (0, "stopped")]] * 2
    )
    newest = committed(life.folder.checkpoints)[0]
    assert sorted(newest.nodes) == ["ranks-0-0", "ranks-1-1"]
    shutil.copytree(tmp_path / "stopped", tmp_path / "one node")
    on_one = begin_again(life, tmp_path / "one node")
    assert on_ranks(2, attempts, (life, math.inf), nodes=2) == [[(7, "finished")]] * 2
    assert on_ranks(2, attempts, (on_one, math.inf)) == [[(7, "finished")]] * 2
    for each in (life, undisturbed):
        names = committed(each.folder.checkpoints)[0].whole.files
        assert "ranks-1-1/small-files.zip" in names
    assert weights_of(life, "zip") == weights_of(undisturbed, "zip") == weights_of(on_one, "top")


def weights_of(life: Life, where: str) -> dict[str, list[Any]]:
    """Return the parts of the model and its optimizer in all shards of the newest checkpoint."""
    files = [*RankFiles(committed(life.folder.checkpoints)[0].path).every("shard-*.pth")]
    assert [file.member is None for file in files] == [where == "top"] * 2
    return {
        f"{path} of {number}": part["part"].tolist()
        for number, file in enumerate(files)
        for path, part in file.load().items()
    }


def begin_again(life: Life, path: Path) -> Life:
    folder = type(life.folder)(path)
    return Life(folder, life.trial_class, life.config, life.hparams, life.attempts)


def whole_state(distributed: Distributed, life: Life, tick: float) -> dict[str, Any]:
    """Return the whole trained state after an attempt."""
    life.attempt(StopAt(tick), distributed)
    return state_of(Sharded.last)


def state_of(trial: Sharded) -> dict[str, Any]:
    parameters = dict(trial.model.named_parameters())
    return {
        "weights": {name: whole(parameter) for name, parameter in parameters.items()},
        "gradients": {name: whole(grad) for name, each in parameters.items() if (grad := each.grad) is not None},
        "optimizer": [
            {key: whole(value) for key, value in trial.optimizer.state[parameter].items()}
            for parameter in parameters.values()
        ],
    }


def whole(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_ranks_goes_on_with_the_same_numbers(
    on_ranks: OnRanks, tmp_path: Path, before: int, after: int
) -> None:
    life = begin(tmp_path, **AGGREGATED)
    saved = on_ranks(before, whole_state, life, 6)[0]
    restored = on_ranks(after, whole_state, life, 1)
    assert [differences(of_rank, saved) for of_rank in restored] == [[]] * after
    assert [gradient.any() for gradient in saved["gradients"].values()] == [True] * 4


def test_one_process_loads_the_whole_model(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = begin(tmp_path)
    saved = on_ranks(2, whole_state, life, 3)[0]
    folder = committed(life.folder.checkpoints)[0].path
    trial = load_trial_from_checkpoint_path(folder, trial_class=Sharded)
    assert isinstance(trial, Sharded)
    assert differences(dict(trial.model.named_parameters()), saved["weights"]) == []
    (folder / "shard-1.pth").unlink()
    (folder / "manifest.json").unlink()
    with refused(HpcDetError, "models_state_dict/0/0.weight: ", "20 of 40", "shard-*.pth"):
        load_trial_from_checkpoint_path(folder, trial_class=Sharded)


class Halved(Sharded):
    """Uses all features of the context for a model, and exchanges weights as bfloat16."""

    def prepare(self) -> None:
        self.context.experimental.use_amp(torch.bfloat16)

    def shard(self, model: nn.Sequential) -> None:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda weights: nn.utils.clip_grad_norm_(weights, max_norm=0.5)
        )
        return {"loss": loss}


class HalvedInDdp(Halved):
    def shard(self, model: nn.Sequential) -> None:
        """Do not shard the model."""


@pytest.mark.parametrize(("trial_class", "in_ddp", "tolerance"), [(Sharded, InDdp, 1e-5), (Halved, HalvedInDdp, 2e-2)])
def test_training_and_validation_are_as_in_ddp(
    on_ranks: OnRanks, tmp_path: Path, trial_class: type[Sharded], in_ddp: type[Sharded], tolerance: float
) -> None:
    """A validation has nine records: five on one rank, four on the other."""
    sharded, plain = (begin(tmp_path / kind.__name__, kind, **AGGREGATED) for kind in (trial_class, in_ddp))
    on_ranks(2, attempts, (sharded, math.inf), (plain, math.inf))
    assert len(sharded.series) == len(plain.series) > 4
    for (kind, steps, metrics), (other_kind, other_steps, expected) in zip(sharded.series, plain.series, strict=True):
        assert (kind, steps) == (other_kind, other_steps)
        assert metrics == pytest.approx(expected, rel=tolerance)
    assert "shard-0.pth" in sharded.newest
    assert "shard-0.pth" not in plain.newest


# --- what cannot be


def refusals(distributed: Distributed) -> list[list[str]]:
    """Return the problems of each model that cannot be trained this way."""

    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))

    def context(gang: Distributed = distributed, **optimizations: Any) -> PyTorchTrialContext:
        config = {"optimizations": optimizations}
        return PyTorchTrialContext({"hparams": {}, "config": config}, gang)

    half = layers()
    fully_shard(half[0])
    on_one, whole, model = layers(), layers(), layers()
    fully_shard(on_one, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))["parts"])
    fully_shard(whole)
    later = context()
    later.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    later.wrap_model(model)
    fully_shard(model)

    return [
        said(lambda: context().wrap_model(half)),
        said(lambda: context().wrap_model(on_one)),
        said(lambda: context(Distributed()).wrap_model(whole)),
        said(lambda: context(gradient_compression=True).wrap_model(whole, static_graph=True)),
        said(PyTorchStrategy(InFull(later), later).check),
    ]


class InFull(Sharded):
    def __init__(self, context: PyTorchTrialContext) -> None:
        """Do nothing: the test passes a context whose model is already wrapped."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {}


def said(attempt: Callable[[], object]) -> list[str]:
    with pytest.raises(UsageError) as error:
        attempt()
    return error.value.problems


def test_what_cannot_be_trained_is_refused_in_words(on_ranks: OnRanks) -> None:
    half, on_one, alone, options, later = on_ranks(2, refusals)[0]
    model = "wrap_model: FSDPSequential: "
    each_names(half, ["wrap_model: Sequential: ", 2, "1.weight, 1.bias", "fully_shard"])
    each_names(on_one, [model, "1 of the 2 ranks", "fully_shard", "mesh"])
    each_names(alone, [model, "fully_shard", "context.distributed.get_size() > 1"])
    names = ("static_graph", "optimizations.gradient_compression")
    each_names(options, *[[model, name, "DDP"] for name in names])
    facts = [
        ["InFull: ", "FSDPSequential", "wrap_model", "fully_shard"],
        ["InFull: ", "4 parameters", "wrapped", "fully_shard"],
        ["InFull: ", "evaluate_full_dataset", "rank 0", "evaluate_batch"],
    ]
    each_names(later, *facts)
