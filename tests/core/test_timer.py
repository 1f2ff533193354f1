from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hpc_det.core.timer import Timer, synchronized
from tests.facts import refused


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float, *then: Callable[[], Any]) -> Callable[[], None]:
        def function() -> None:
            self.now += seconds
            for each in then:
                each()

        return function


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> Timer:
    timer = Timer(clock)
    timer.start()
    return timer


def test_what_runs_within_another_counts_once_under_its_own_name(timer: Timer, clock: Clock) -> None:
    copy = timer.timed("to_device", clock.takes(2))
    load = timer.timed("dataloader_next", clock.takes(3))
    timer.timed("train_batch", clock.takes(10, load, copy, load))()
    assert timer.take() == {"train_batch": 10, "dataloader_next": 6, "to_device": 2}
    assert timer.take() == {}


def test_what_fails_counts_too(timer: Timer, clock: Clock) -> None:
    def fail() -> None:
        clock.now += 1
        raise ValueError("no more")

    inner = timer.timed("inner", fail)
    with refused(ValueError, "no more"):
        timer.timed("outer", clock.takes(5, inner))()
    assert timer.take() == {"outer": 5, "inner": 1}


def test_of_a_whole_only_callbacks_count_for_themselves(timer: Timer, clock: Clock) -> None:
    copy = timer.timed("to_device", clock.takes(2))
    hook = timer.timed("callbacks.Drawing.on_validation_end", clock.takes(4))
    copy()
    timer.timed_as_a_whole("validation", clock.takes(10, copy, hook))()
    assert timer.take() == {"to_device": 2, "validation": 12, "callbacks.Drawing.on_validation_end": 4}


def test_the_loading_of_batches_counts_and_not_what_becomes_of_them(timer: Timer, clock: Clock) -> None:
    def batches() -> Iterator[int]:
        for number in range(3):
            clock.now += 1
            yield number

    taken = []
    for batch in timer.timed_batches("dataloader_next", batches()):
        clock.now += 100
        taken.append(batch)
    assert taken == [0, 1, 2]
    assert timer.take() == {"dataloader_next": 3}


def test_nothing_counts_before_the_start_nor_after_the_stop(timer: Timer, clock: Clock) -> None:
    work = timer.timed("work", clock.takes(1))
    timer.stop()
    work()
    timer.start()
    work()
    timer.stop()
    work()
    assert timer.take() == {"work": 1}


def test_what_another_thread_calls_does_not_count(timer: Timer, clock: Clock) -> None:
    work = timer.timed("to_device", clock.takes(1))
    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert timer.take() == {}


def test_a_synchronized_clock_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    gpu = torch.device("cuda", 1)
    work = Timer(synchronized(gpu))
    work.start()
    work.timed("train_batch", lambda: None)()
    assert waited == [gpu, gpu], "before it begins, and when it has ended"
    synchronized(torch.device("cpu"))()
    assert waited == [gpu, gpu]
