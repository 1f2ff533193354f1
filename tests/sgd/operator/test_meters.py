from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpc_det.errors import UsageError
from hpc_det.sgd.operator.meters import AverageMeter, AverageMeterCollection


def test_a_mean_is_weighted_by_the_samples() -> None:
    meter = AverageMeter()
    meter.update(1.0, n=3)
    meter.update(5.0)
    assert (meter.val, meter.sum, meter.count, meter.avg) == (5.0, 8.0, 4, 2.0)


def test_a_meter_is_as_new_after_a_reset() -> None:
    meter = AverageMeter()
    meter.update(1.0)
    meter.reset()
    assert meter.count == 0
    assert math.isnan(meter.avg)


def test_tensors_become_numbers_and_arrays_stay_arrays() -> None:
    meter, arrays = AverageMeter(), AverageMeter()
    meter.update(torch.tensor([2.0], requires_grad=True))
    meter.update(np.float32(4))
    arrays.update(np.array([0.0, 2.0]))
    arrays.update(np.array([2.0, 4.0]))
    assert (type(meter.avg), meter.avg, meter.val) == (float, 3.0, 4.0)
    assert arrays.avg.tolist() == [1.0, 3.0]


@pytest.mark.gpu
def test_values_on_a_gpu_are_summed_there_as_precisely_as_elsewhere() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    on_gpu, on_cpu = AverageMeter(), AverageMeter()
    on_cpu.update(0.5, n=2)
    on_gpu.update(0.5, n=2)
    for value in values:
        on_cpu.update(value, n=3)
        on_gpu.update(value.cuda(), n=3)
    assert on_gpu.avg == pytest.approx(on_cpu.avg, rel=1e-14)
    assert on_gpu.val == on_cpu.val


def test_a_collection_says_of_each_metric_its_mean_and_its_last() -> None:
    meters = AverageMeterCollection()
    meters.update({"loss": 1.0, "num_samples": 3})
    meters.update({"loss": torch.tensor(5.0), "num_samples": 1})
    assert meters.summary() == {"batch_count": 2, "num_samples": 4, "loss": 2.0, "last_loss": 5.0}


def test_a_batch_without_samples_weighs_one_and_n_says_otherwise() -> None:
    meters = AverageMeterCollection()
    meters.update({"loss": 1.0})
    meters.update({"loss": 4.0}, n=2)
    assert meters.summary() == {"batch_count": 2, "num_samples": 3, "loss": 3.0, "last_loss": 4.0}


def test_the_metrics_of_a_user_are_left_as_they_are() -> None:
    metrics = {"loss": 1.0, "num_samples": 3}
    AverageMeterCollection().update(metrics)
    assert metrics == {"loss": 1.0, "num_samples": 3}


def test_a_batch_that_returned_nothing_is_named() -> None:
    with pytest.raises(UsageError, match="metrics of a batch are NoneType; return a dict"):
        AverageMeterCollection().update(None)  # type: ignore[arg-type]
