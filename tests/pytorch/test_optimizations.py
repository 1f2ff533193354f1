"""Each of `optimizations` has its effect: on the collectives of the ranks, or on the numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.pytorch.loop.training_report import TrainingReport
from hpc_det.pytorch.strategies.strategy import make_data_parallel_mpu
from hpc_det.pytorch.trial.callback import Callbacks
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.pytorch.exchanged import Exchange, exchanged
from tests.pytorch.trials import Life

PARAMETERS = 6 * 4 + 4 + 4 * 1 + 1


def new_context(distributed: Distributed, **optimizations: Any) -> PyTorchTrialContext:
    config = {"optimizations": optimizations}
    ids = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}}
    return PyTorchTrialContext({**ids, "config": config}, distributed)


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))


def exchanged_in_batches(
    distributed: Distributed, optimizations: dict[str, Any], ddp_options: dict[str, Any]
) -> list[list[Exchange]]:
    """Return the collectives in each of three batches."""
    context = new_context(distributed, **optimizations)
    model = context.wrap_model(new_model(), **ddp_options)
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def train(number: int) -> None:
        if (number + 1) % context.aggregation_frequency:
            with context.keeping_gradients():
                return one_batch()
        return one_batch()

    def one_batch() -> None:
        context.backward(model(torch.ones(3, 6)).sum())
        context.step_optimizer(optimizer)

    return [exchanged(partial(train, number)) for number in range(3)]


def exchanged_in_cases(distributed: Distributed) -> list[list[list[Exchange]]]:
    return [exchanged_in_batches(distributed, optimizations, options) for optimizations, options, _ in CASES]


WHOLE = [("all_reduce", 4 * PARAMETERS)]
HALF = [("all_reduce", 2 * PARAMETERS)]
EACH = [("all_reduce", 4 * elements) for elements in (1, 4, 4, 24)]


CASES: list[tuple[dict[str, Any], dict[str, Any], list[list[Exchange]]]] = [
    ({}, {}, [WHOLE] * 3),
    ({"aggregation_frequency": 3}, {}, [[], [], WHOLE]),
    ({"gradient_compression": True}, {}, [HALF] * 3),
    ({"gradient_compression": True, "aggregation_frequency": 2}, {}, [[], HALF, []]),
    ({"tensor_fusion_threshold": 0}, {}, [EACH] * 3),
    ({"tensor_fusion_threshold": 1}, {}, [WHOLE] * 3),
    ({"tensor_fusion_threshold": 0}, {"bucket_cap_mb": 1}, [WHOLE] * 3),
    ({"tensor_fusion_threshold": 0}, {"bucket_cap_mb_list": [1]}, [WHOLE] * 3),
]
"""`optimizations`, the DDP options of the trial, and the collectives in each of three batches."""


def test_gradients_are_exchanged_as_the_experiment_says_and_nothing_else_is(on_ranks: OnRanks) -> None:
    expected = [batches for _, _, batches in CASES]
    assert on_ranks(2, exchanged_in_cases) == [expected] * 2


def reported(distributed: Distributed, averages: bool) -> tuple[float, bool, bool]:
    """Return the metric, whether the sums of this rank were read, and whether rank 1's request to stop arrived."""
    context = new_context(distributed, average_training_metrics=averages)
    context.set_stop_requested(distributed.rank == 1)
    strategy: Any = SimpleNamespace(mpu=make_data_parallel_mpu(distributed), records=1)
    report = TrainingReport(context, strategy, [0, 1], Callbacks({}))
    report.add({"rank": torch.tensor(float(distributed.rank))})
    sums, asked = report.window.sums, []
    report.window.sums = lambda: asked.append(True) or sums()  # type: ignore[method-assign, func-returns-value]
    metrics, _, stops = report.close()
    return metrics["rank"], bool(asked), stops


def test_without_averaging_the_first_rank_speaks_alone_and_the_others_ask_their_devices_for_nothing(
    on_ranks: OnRanks,
) -> None:
    assert on_ranks(2, reported, True) == [(0.5, True, True)] * 2
    assert on_ranks(2, reported, False) == [(0.0, True, True), (0.0, False, True)]


@pytest.mark.parametrize(("level", "computes_in"), [("O0", torch.float32), ("O1", torch.bfloat16)])
def test_mixed_precision_of_the_experiment_is_that_of_use_amp(level: str, computes_in: torch.dtype) -> None:
    context = new_context(Distributed(), mixed_precision=level)
    seen: list[torch.dtype] = []
    layer = nn.Linear(6, 4)
    layer.register_forward_hook(lambda *of_layer: seen.append(of_layer[2].dtype))
    model = context.wrap_model(nn.Sequential(layer))
    assert model(torch.ones(1, 6)).dtype == torch.float32
    assert seen == [computes_in]


def test_what_the_trial_says_of_precision_itself_goes_before_the_experiment() -> None:
    context = new_context(Distributed(), mixed_precision="O1")
    context.experimental.use_amp(torch.float16)
    context.wrap_model(new_model())
    assert context.precision.scales_losses


def test_two_who_scale_losses_are_one_too_many() -> None:
    context = new_context(Distributed(), mixed_precision="O1")
    with refused(UsageError, "wrap_scaler: ", "optimizations.mixed_precision", "O1"):
        context.wrap_scaler(torch.amp.GradScaler("cpu"))


def test_training_in_mixed_precision_gives_other_numbers(tmp_path: Path) -> None:
    plain, mixed = (
        Life.begin(tmp_path / level, optimizations={"mixed_precision": level}, searcher={"max_length": {"batches": 4}})
        for level in ("O0", "O1")
    )
    plain.attempt()
    mixed.attempt()
    (_, _, one), (_, _, other) = plain.series[0], mixed.series[0]
    assert one["loss"] != other["loss"] == pytest.approx(one["loss"], rel=0.05)
