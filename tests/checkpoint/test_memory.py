from __future__ import annotations

import mmap
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from hpc_det.checkpoint.memory import copy_into


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(b"abcd"), memoryview(b"0123456789")[3:7]])
def test_bytes_are_copied_to_their_place(data: bytes) -> None:
    memory = mmap.mmap(-1, 8192)
    copy_into(memory, 5, memoryview(data))
    assert memory[:20] == bytes(5) + bytes(data) + bytes(15 - len(data))
    memory.close()


def test_what_is_outside_is_refused() -> None:
    memory = mmap.mmap(-1, 4096)
    for offset in (-1, 4094):
        with pytest.raises(ValueError, match="outside"):
            copy_into(memory, offset, memoryview(b"abc"))


def test_other_threads_run_meanwhile() -> None:
    size = 1 << 22
    memory, data = mmap.mmap(-1, size), memoryview(os.urandom(size))
    assert others_steps(partial(operator.setitem, memory, slice(0, size), data)) == 0
    assert others_steps(partial(copy_into, memory, 0, data)) > 0


def others_steps(work: Callable[[], object]) -> int:
    """How often another thread ran during 200 calls of `work`: none is interrupted, each lets others run."""
    steps, ends = 0, threading.Event()

    def count() -> None:
        nonlocal steps
        while not ends.is_set():
            steps += 1
            time.sleep(0)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        meanwhile = 0
        for _ in range(200):
            before = steps
            work()
            meanwhile += steps - before
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(before_s)
    return meanwhile
