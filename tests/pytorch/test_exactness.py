"""State that a resume must restore beside weights and generators: one small trial for each kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.errors import HpcDetError
from hpc_det.pytorch import DataLoader, MetricReducer, PyTorchCallback, PyTorchTrialContext
from hpc_det.pytorch.state.state import rank_state
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.pytorch.test_samplers import make_batch_sampler
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same


class AsksInValidation(Tiny):
    """Its validation depends on the position of the training."""

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        where = self.context.current_train_batch() + 100 * self.context.current_train_epoch()
        flags = 1000 * self.context.is_epoch_start() + 2000 * self.context.is_epoch_end()
        return {**super().evaluate_batch(batch), "where": where + flags}


class Thawing(PyTorchCallback):
    """Unfreezes the first layer in the second epoch, and keeps a dropout in eval mode in each."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self._model.get_submodule("0").requires_grad_(epoch_idx > 0)
        self._model.get_submodule("1").eval()


class GraduallyThawed(Tiny):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {**super().build_callbacks(), "thawing": Thawing(self.context.models[0])}


class Drawing(PyTorchCallback):
    """Draws random numbers in every hook in which a user might, for example to log samples."""

    def draw(self, *arguments: Any, **named: Any) -> None:
        random.random()
        torch.rand(7)

    on_trial_startup = on_checkpoint_load_start = on_training_start = draw
    on_checkpoint_save_start = on_checkpoint_write_end = on_checkpoint_upload_end = draw
    on_validation_start = on_validation_epoch_end = draw


class Draws(Tiny):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {**super().build_callbacks(), "drawing": Drawing()}


class AccumulatesByHand(Tiny):
    """Accumulates gradients over three batches itself."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.context.backward(loss / 3)
        if batch_idx % 3 == 2:
            self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class OwnLoaders(Tiny):
    """Uses the guide's recipe for loaders that hpc_det does not provide."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        return self.by_recipe(22, "training", self.context.get_initial_batch())

    def build_validation_data_loader(self) -> Any:
        return self.by_recipe(9, "validation", 0)

    def by_recipe(self, records: int, mode: str, skip: int) -> Any:
        dataset, distributed = self.loader(records).dataset, self.context.distributed
        seed, batch_size = self.context.get_trial_seed(), self.context.get_per_slot_batch_size()
        batches = make_batch_sampler(dataset, mode, seed, distributed.size, distributed.rank, batch_size, skip)
        return torch.utils.data.DataLoader(dataset, batch_sampler=batches)


class SumOfWeights(MetricReducer):
    """Reads the model itself, independently of the training in between."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def reset(self) -> None:
        pass

    def per_slot_reduce(self) -> float:
        return sum(parameter.sum().item() for parameter in self.model.parameters())

    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> float:
        return per_slot_metrics[0]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class ReducesWeights(Tiny):
    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.wrap_reducer(SumOfWeights(self.model), "weights")


class Slowing(PyTorchCallback):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def on_validation_start(self) -> None:
        self._optimizer.param_groups[0]["lr"] *= 0.9


class SlowedByValidation(Tiny):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"slowing": Slowing(self.optimizer)}


class DoublePrecision(Tiny):
    """Its optimizer keeps float32 state beside float64 state."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(5, 1).double())
        self.optimizer = context.wrap_optimizer(torch.optim.NAdam(self.model.parameters(), lr=0.01))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return super().train_batch([values.double() for values in batch], epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return super().evaluate_batch([values.double() for values in batch])

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


ONE_EACH = [
    *(AsksInValidation, GraduallyThawed, Draws, AccumulatesByHand, OwnLoaders),
    *(ReducesWeights, SlowedByValidation, DoublePrecision),
]


@pytest.mark.integration
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("trial", ONE_EACH)
def test_a_stop_at_any_tick_changes_no_bit(tmp_path: Path, trial: type[Tiny], every: int) -> None:
    undisturbed, never = Life.begin(tmp_path / "undisturbed", trial), StopAt()
    undisturbed.attempt(never)
    for tick in range(1, never.ticks + 1, every):
        life = Life.begin(tmp_path / str(tick), trial)
        assert life.attempt(StopAt(tick)).end == "stopped"
        life.attempt()
        assert_same(life, undisturbed)


class OwnBuffers(Tiny):
    """The ranks have different running means of a batch norm, except for those of a second, frozen model."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        frozen = nn.BatchNorm1d(5).requires_grad_(False)
        self.frozen = context.wrap_model(frozen)
        self.model = context.wrap_model(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)), broadcast_buffers=False)
        self.optimizer.add_param_group({"params": [*self.model.parameters()]})

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(24, shuffle=True)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        return super().train_batch((self.frozen(inputs), targets), epoch_idx, batch_idx)


def test_buffers_that_ranks_do_not_share_come_back_on_each(on_ranks: OnRanks, tmp_path: Path) -> None:
    undisturbed, life = (Life.begin(tmp_path / name, OwnBuffers) for name in ("whole", "cut"))
    on_ranks(2, lived, undisturbed, 99)
    assert on_ranks(2, lived, life, 9) == [True, True]
    on_ranks(2, lived, life, 99)
    assert_same(life, undisturbed)
    own = [life.newest[f"rank-{rank}.pth"]["buffers"] for rank in (0, 1)]
    assert all(len(buffers) == 6 for buffers in own)
    assert not torch.equal(own[0]["1.running_mean"], own[1]["1.running_mean"])


class Watched(nn.Sequential):
    looks = 0

    def named_buffers(self, *arguments: Any, **options: Any) -> Any:
        self.looks += 1
        return super().named_buffers(*arguments, **options)


def test_a_save_looks_through_the_buffers_of_a_model_once() -> None:
    """Training waits for this."""
    model = Watched(nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5))
    spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}, "config": {}}
    context = PyTorchTrialContext(spec, Distributed(size=2))
    context.models, context.wrapped_models = [model], [model]
    assert len(rank_state(context, MetricWindow())["buffers"]) == 6
    assert model.looks == 1


class Branching(nn.Module):
    """One layer is used only in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, inputs: torch.Tensor, whole: bool = True) -> torch.Tensor:
        outputs: torch.Tensor = self.always(inputs) + (self.sometimes(inputs) if whole else 0)
        return outputs


class Centred(nn.Linear):
    """Subtracts a running mean, also during training."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__(5, 1)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(dim=0)
        return super().forward(inputs - self.mean)


class Aggregating(Tiny):
    """A trial whose model and DDP options are set by each case."""

    model: nn.Module
    new_model: Callable[[], nn.Module]
    ddp_options: ClassVar[dict[str, bool]] = {}

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(self.new_model(), **self.ddp_options)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


class Sometimes(Aggregating):
    new_model = Branching
    ddp_options: ClassVar = {"find_unused_parameters": True}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = (self.model(inputs, batch_idx % 2 == 0) - targets).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class RunningMean(Aggregating):
    new_model = Centred


class BucketView(Aggregating):
    @staticmethod
    def new_model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1))

    ddp_options: ClassVar = {"gradient_as_bucket_view": True}


def weights_after(distributed: Distributed, life: Life, stop_at: float) -> list[Any]:
    loop = life.attempt(StopAt(stop_at), distributed)
    return [parameter.detach().numpy().tobytes() for parameter in loop._context.models[0].parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("trial", "ranks", "aggregation", "tick"),
    [(Sometimes, 2, 2, 2), (RunningMean, 2, 3, 3), (BucketView, 3, 3, 5)],
)
def test_a_stop_between_optimizer_steps_changes_no_bit_on_any_rank(
    on_ranks: OnRanks, tmp_path: Path, trial: type[Tiny], ranks: int, aggregation: int, tick: int
) -> None:
    optimizations = {"aggregation_frequency": aggregation}
    undisturbed, life = (Life.begin(tmp_path / name, trial, optimizations=optimizations) for name in ("whole", "cut"))
    expected = on_ranks(ranks, weights_after, undisturbed, 99)
    on_ranks(ranks, weights_after, life, tick)
    assert on_ranks(ranks, weights_after, life, 99) == expected
    assert expected == [expected[0]] * ranks
    assert_same(life, undisturbed)


class Killed(Exception):
    pass


class MortalDraws(Draws):
    dies_at: int | None = None

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == MortalDraws.dies_at:
            MortalDraws.dies_at = None
            raise Killed
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_hooks_of_a_checkpoint_may_draw_random_numbers(tmp_path: Path) -> None:
    """The undisturbed run continues after the hooks in the same process, the other one from the file."""
    undisturbed, life = (Life.begin(tmp_path / name, MortalDraws) for name in ("undisturbed", "killed"))
    undisturbed.attempt()
    MortalDraws.dies_at = 9
    with pytest.raises(Killed):
        life.attempt()
    life.attempt()
    assert_same(life, undisturbed)


class Strange(PyTorchCallback):
    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


class Unsavable(Tiny):
    trained = False

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        Unsavable.trained = True
        return super().train_batch(batch, epoch_idx, batch_idx)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"strange": Strange()}


def test_what_cannot_be_saved_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    with refused(HpcDetError, "state_dict.pth: callbacks.strange.self: ", "Strange"):
        Life.begin(tmp_path, Unsavable).attempt()
    assert not Unsavable.trained


class Together(Tiny):
    """The ranks use a collective in each of their four validation batches."""

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(8)

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        self.exchanged = 0

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.exchanged += sum(self.context.distributed.allgather(1))
        return super().evaluate_batch(batch)


def lived(distributed: Distributed, life: Life, stop_at: float) -> bool:
    return life.attempt(StopAt(stop_at), distributed).end == "stopped"


@pytest.mark.parametrize("tick", [6, 7])
def test_ranks_leave_a_validation_at_the_same_batch(on_ranks: OnRanks, tmp_path: Path, tick: int) -> None:
    """Five batches are trained before the validation: tick 6 is its first batch, 7 its second."""
    undisturbed, life = (Life.begin(tmp_path / name, Together, {"global_batch_size": 2}) for name in ("whole", "cut"))
    whole = {"searcher": {"max_length": {"batches": 6}}}
    for each in (undisturbed, life):
        each.config = {**each.config, "searcher": {**each.config["searcher"], **whole["searcher"]}}
    on_ranks(2, lived, undisturbed, 99)
    assert on_ranks(2, lived, life, tick) == [True, True]
    on_ranks(2, lived, life, 99)
    assert_same(life, undisturbed)
