from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from hpc_det.errors import UsageError
from hpc_det.sgd.operator.meters import AverageMeter, AverageMeterCollection, Bar, TimerCollection, TimerStat
from tests.facts import refused
from tests.sgd.operators import Classifier, batches, classifier


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
    with refused(UsageError, "NoneType"):
        AverageMeterCollection().update(None)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace perf_counter; the only element of the list is its value."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_last_ten_times_make_the_mean(clock: list[float]) -> None:
    timers = TimerCollection()
    timers.enable()
    for seconds in [100.0, *range(1, 11)]:
        with timers.record("fwd"):
            clock[0] += seconds
    assert timers.stats() == {"mean_fwd_s": 5.5}


def test_timers_are_off_at_first_and_again_when_disabled() -> None:
    timers = TimerCollection()
    with timers.record("fwd"):
        pass
    timers.enable()
    timers.disable()
    with timers.record("fwd"):
        pass
    assert timers.stats() == {}


def test_a_reset_forgets_and_parts_may_lie_in_parts(clock: list[float]) -> None:
    timers = TimerCollection()
    timers.enable()
    with timers.record("old"):
        pass
    timers.reset()
    with timers.record("epoch"):
        clock[0] += 1
        with timers.record("fwd"):
            clock[0] += 2
    assert timers.stats() == {"mean_fwd_s": 2, "mean_epoch_s": 3}


def test_a_timer_without_times_has_no_mean() -> None:
    assert math.isnan(TimerStat().mean)


def test_on_a_gpu_each_part_waits_for_the_device_and_only_when_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    timers = TimerCollection(torch.device("cuda", 1))
    with timers.record("fwd"):
        pass
    assert waits == []
    timers.enable()
    with timers.record("fwd"):
        assert waits == [torch.device("cuda", 1)]
    assert len(waits) == 2


def test_rank_0_shows_a_bar_with_the_last_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    operator = classifier(use_tqdm=True)
    operator.train_epoch(iter(batches(2, 2)), {"epoch_idx": 1, "num_epochs": 10, "__num_steps__": 2})
    shown = capsys.readouterr().err
    assert "2/10e" in shown
    assert "0/2" in shown


def test_without_num_steps_the_length_is_that_of_the_iterator(capsys: pytest.CaptureFixture[str]) -> None:
    classifier(use_tqdm=True).train_epoch(batches(2, 2, 2), {})
    shown = capsys.readouterr().err
    assert "1e:" in shown
    assert "0/3" in shown


def test_a_bar_shows_metrics_when_it_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("1e", 2)
    bar._bar.mininterval = 0  # seconds
    with bar:
        bar.advance({"train_loss": 0.25, "note": "text"})
    assert "train_loss=0.25" in capsys.readouterr().err


def test_other_ranks_and_a_false_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Classifier({}, 1, 1, use_tqdm=True).train_epoch(batches(2))
    classifier().train_epoch(batches(2))
    assert capsys.readouterr().err == ""
