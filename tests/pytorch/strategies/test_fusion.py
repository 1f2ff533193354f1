"""The size of DDP's buckets is tuned in the first batches.

Models and sizes are small; a clock that depends on the number of buckets replaces the network.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from hpc_det.config.merge import merge
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.pytorch.strategies import fusion
from hpc_det.pytorch.strategies.ddp import DataParallel, data_parallel
from hpc_det.pytorch.strategies.fusion import FusionTuner
from hpc_det.store.folders import TrialFolder
from tests.distributed.ranks import OnRanks
from tests.pytorch.exchanged import exchanged
from tests.pytorch.trials import CONFIG, Life, StopAt, Tiny, assert_same

SIZES = (0.0001, 0.0003, 0.001)
EXCHANGES = 3


def buckets(model: nn.Module) -> list[int]:
    """Return the bytes of each bucket, which DDP knows from its first backward pass on."""
    assert isinstance(model, DataParallel)
    said = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return [int(size) for size in str(said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]).split(",")]


class Clock:
    """A clock by which a batch with `best` buckets takes the shortest time; each bucket more or less adds time."""

    def __init__(self, best: int) -> None:
        self._best = best
        self._now = 0.0

    def __call__(self, tuner: FusionTuner) -> float:
        self._now += 1 + abs(len(buckets(tuner._models[0])) - self._best)
        return self._now


def tuned_by(best: int) -> None:
    """Make the tuner of this process prefer `best` buckets from now on."""
    fusion.SIZES_MB = SIZES  # type: ignore[assignment]
    fusion.EXCHANGES = EXCHANGES
    clock = Clock(best)
    FusionTuner._now = lambda tuner: clock(tuner)  # type: ignore[method-assign, assignment]


class Deep(Tiny):
    """Nine layers, most of them of 728 bytes, and no state beside the trained one."""

    ddp_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(self.new_layers(), **self.ddp_options)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9))

    @staticmethod
    def new_layers() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 13), *(nn.Linear(13, 13) for _ in range(7)), nn.Linear(13, 1))

    def build_callbacks(self) -> dict[str, Any]:
        return {}


class Views(Deep):
    ddp_options: ClassVar = {"gradient_as_bucket_view": True}


def begin(distributed: Distributed, folder: Path, trial: type[Tiny] = Deep, **optimizations: Any) -> Life:
    if distributed.is_chief:
        TrialFolder(folder).checkpoints.mkdir(parents=True)
    distributed.barrier()
    config = merge(CONFIG, {"optimizations": {"auto_tune_tensor_fusion": True, **optimizations}})
    return Life(TrialFolder(folder), trial, config, {"global_batch_size": 4, "workers": 0})


def attempts(distributed: Distributed, life: Life, best: int, *stops_at: float) -> tuple[Any, list[int]]:
    """Run an attempt for each stop, and one without a stop; return the size chosen by the last one, and its buckets."""
    tuned_by(best)
    for stop_at in (*stops_at, math.inf):
        loop = life.attempt(StopAt(stop_at), distributed)
    context: Any = loop._context
    return context.fusion.chosen_mb, buckets(context.wrapped_models[0])


def disturbed_and_not(distributed: Distributed, folder: Path) -> list[tuple[Any, list[int]]]:
    """Run trials without a stop, and with stops while the first and second size are tried, later, and between steps."""
    return [
        attempts(distributed, begin(distributed, folder / "whole"), 2),
        attempts(distributed, begin(distributed, folder / "cut"), 2, 2, 4, 6),
        attempts(distributed, begin(distributed, folder / "whole views", Views, **COMPACT), 3),
        attempts(distributed, begin(distributed, folder / "cut views", Views, **COMPACT), 3, 4),
    ]


COMPACT = {"gradient_compression": True, "aggregation_frequency": 2}


def test_a_run_that_is_stopped_while_it_tunes_or_later_goes_on_with_the_same_buckets_and_bits(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    whole, cut, whole_views, cut_views = on_ranks(3, disturbed_and_not, tmp_path)[0]
    assert whole == cut
    assert whole_views == cut_views
    for kind in ("", " views"):
        assert_same(*(Life(TrialFolder(tmp_path / f"{name}{kind}")) for name in ("cut", "whole")))


def tuned_to_few_and_many(distributed: Distributed, folder: Path) -> list[tuple[Any, list[int]]]:
    return [attempts(distributed, begin(distributed, folder / str(best)), best) for best in (1, 9)]


def test_other_buckets_are_other_bits(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Control for the test above."""
    (few_mb, few), (many_mb, many) = on_ranks(3, tuned_to_few_and_many, tmp_path)[0]
    assert few_mb > many_mb
    assert len(few) < len(many)
    with pytest.raises(AssertionError):
        assert_same(*(Life(TrialFolder(tmp_path / best)) for best in ("1", "9")))


# --- one model


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}


def resized(distributed: Distributed) -> dict[str, tuple[int, int]]:
    """Return the largest bucket [bytes] of each kind of DDP, with a bucket for all gradients and with one for each."""
    return {
        kind: (_resized(distributed, options, 1), _resized(distributed, options, 0)) for kind, options in KINDS.items()
    }


def _resized(distributed: Distributed, options: dict[str, Any], megabytes: int) -> int:
    """Check that resizing keeps the gradients, and that later gradients are those of an unchanged model."""
    model, other = (data_parallel(_new_model(), distributed.device, options) for _ in range(2))
    for _ in range(2):
        _backward(distributed, model)
        _backward(distributed, other)
    model.resize_buckets(megabytes)
    for _ in range(3):
        assert _gradients(model) == _gradients(other)
        _backward(distributed, model)
        _backward(distributed, other)
    return max(size for what, size in exchanged(partial(_backward, distributed, model)) if what == "all_reduce")


def _new_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _backward(distributed: Distributed, model: nn.Module) -> None:
    """Run a backward pass, which adds to the gradients."""
    model(torch.arange(15.0).reshape(3, 5) + distributed.rank).square().sum().backward()


def _gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_buckets_of_every_kind_of_ddp_are_resized_and_no_gradient_changes(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, resized):
        assert found == dict.fromkeys(KINDS, (4 * (20 + 4 + 4 + 4 + 4 + 1), 4 * 20))


def left_alone(distributed: Distributed) -> list[bool]:
    compressed, hooked = (data_parallel(_new_model(), distributed.device, {}) for _ in range(2))
    compressed.compress_gradients()
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    given: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 3}, {"bucket_cap_mb_list": [3]}]
    models = [data_parallel(_new_model(), distributed.device, options) for options in given]
    return [model.leaves_bucket_size for model in (compressed, hooked, *models)]


def test_what_the_trial_says_of_buckets_itself_goes_before_the_experiment(on_ranks: OnRanks) -> None:
    assert on_ranks(2, left_alone) == [[True, False, True, False, False]] * 2


def test_only_sizes_are_tried_that_lay_out_a_model_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {mb: fusion._sizes(mb) for mb in (0, 0.5, 1, 1.5, 30, 100, 3000)}
    assert sizes == {
        0: [1],
        0.5: [1],
        1: [1],
        1.5: [1, 5],
        30: [1, 5, 25, 100],
        100: [1, 5, 25, 100],
        3000: [1, 5, 25, 100],
    }


def test_a_rank_alone_has_nothing_to_tune(tmp_path: Path) -> None:
    context: Any = begin(Distributed(), tmp_path).attempt()._context
    assert context.fusion is None


def said(distributed: Distributed) -> tuple[str, list[bool]]:
    tuned_by(9)
    model = data_parallel(_new_model(), distributed.device, {})
    tuner = FusionTuner(distributed, [model, nn.Linear(1, 1)])
    tuning: list[bool] = []
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        while tuner.is_tuning:
            _backward(distributed, model)
            tuner.end_exchange()
            tuning.append(tuner.is_tuning)
    return shown.getvalue(), tuning


def test_rank_0_says_what_was_chosen_and_what_was_measured(on_ranks: OnRanks) -> None:
    (spoken, tuning), (silence, _) = on_ranks(2, said)
    assert tuning == [True] * 5 + [False]
    chosen, *measured = re.findall(r"([\d.]+) MB", spoken)
    assert spoken.startswith("hpc-det: ")
    assert spoken.count("\n") == 1
    assert (chosen in measured, measured) == (True, ["0.0001", "0.0003"])
    assert len(re.findall(r"\d+\.0 ms", spoken)) == len(measured)
    assert silence == ""
