from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from torch.utils.data import DataLoader

from hpc_det.sgd.rank.passes import Passes
from tests.facts import refused
from tests.sgd.rank.loaders import Numbers, Stream, passes
from tests.wait import wait_for


def three() -> Passes:
    return passes(["a", "b", "c"])


def test_without_num_steps_a_call_is_a_pass() -> None:
    data = three()
    assert [[*data.batches(None)] for _ in range(2)] == [["a", "b", "c"]] * 2
    assert (data.begun, data.finished) == (2, 2)


def test_the_iterator_goes_on_over_calls_and_begins_anew_at_its_end() -> None:
    data = three()
    seen = [("".join(data.batches(2)), data.begun, data.finished) for _ in range(4)]
    assert seen == [("ab", 1, 0), ("ca", 2, 1), ("bc", 2, 2), ("ab", 3, 2)]


def test_without_num_steps_the_open_pass_is_finished() -> None:
    data = three()
    assert ["".join(data.batches(steps)) for steps in (1, None, None)] == ["a", "bc", "abc"]
    assert (data.begun, data.finished) == (2, 2)


@pytest.mark.parametrize("calls", [(None,), (1, None), (1, 2)])
def test_the_position_after_a_pass_says_nothing_of_how_it_was_made(calls: tuple[int | None, ...]) -> None:
    data, restored = three(), three()
    for steps in calls:
        list(data.batches(steps))
    restored.restore(data.position(), data.own())
    assert restored.position() == data.position()


def test_a_call_may_take_several_passes() -> None:
    data = three()
    assert "".join(data.batches(8)) == "abcabcab"
    assert (data.begun, data.finished) == (3, 2)


def test_no_steps_begin_no_pass() -> None:
    data = three()
    assert [*data.batches(0)] == []
    assert data.begun == 0


@pytest.mark.parametrize("num_steps", [None, 5])
@pytest.mark.parametrize("empty", [[], DataLoader(Stream(0)), DataLoader(Numbers(1), batch_size=2, drop_last=True)])
def test_an_empty_loader_ends_instead_of_looping(empty: Any, num_steps: int | None) -> None:
    data = passes(empty)
    assert [*data.batches(num_steps)] == []
    assert (data.begun, data.finished) == (1, 1)


def test_a_loader_that_is_used_up_ends_the_call() -> None:
    data = passes(iter("abc"))
    assert "".join(data.batches(5)) == "abc"
    assert "".join(data.batches(5)) == ""


def test_where_the_end_is_not_known_beforehand_the_next_call_finds_it() -> None:
    data = passes(DataLoader(Stream(4), batch_size=2))
    assert len([*data.batches(2)]) == 2
    assert (data.begun, data.finished) == (1, 0)
    assert [batch.tolist() for batch in data.batches(None)] == [[0, 1], [2, 3]]
    assert (data.begun, data.finished) == (2, 2)


def test_a_loop_that_breaks_off_leaves_the_rest_to_the_next_call() -> None:
    data = three()
    for batch in data.batches(None):
        if batch == "b":
            break
    assert data.position() == {"begun": 1, "done": 2, "counts": "batches", "is_open": True}
    assert "".join(data.batches(None)) == "c"


def test_a_pass_is_over_with_its_last_batch_also_if_nobody_asks_for_more() -> None:
    data = three()
    batches = data.batches(None)
    assert [next(batches) for _ in range(3)] == ["a", "b", "c"]
    assert data.finished == 1
    assert next(data.batches(1)) == "a"


def test_another_loader_begins_a_pass() -> None:
    data = three()
    assert "".join(data.batches(1)) == "a"
    assert "".join(data.over("xyz").batches(None)) == "xyz"
    assert (data.begun, data.finished) == (2, 2)


def test_an_error_of_the_loader_reaches_the_caller_and_ends_the_pass() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("disk")

    data = passes(Broken())
    with refused(OSError, "disk"):
        [*data.batches(None)]
    assert next(data.batches(1)) == 1


@pytest.mark.integration
def test_worker_processes_end_with_the_pass_and_with_close() -> None:
    others = {*multiprocessing.active_children()}  # of fixtures that several tests share

    def workers() -> set[BaseProcess]:
        return {*multiprocessing.active_children()} - others

    with closing(passes(DataLoader(Numbers(8), num_workers=1), num_workers=2)) as data:
        assert len([*data.batches(None)]) == 8
        assert len([*data.batches(8)]) == 8
        # torch asks its workers to exit, and waits for 5 s at most.
        wait_for(lambda: not workers(), otherwise=workers)
        assert next(data.batches(1)) == 0
        assert workers()
    wait_for(lambda: not workers(), otherwise=workers)
