"""Gates on the cost of a checkpoint, relative to a bare copy and a bare read of the same number of bytes.

`python -m tests.benchmarks checkpoint` measures the figures.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import committed
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.state.state import stored_state
from tests.machine import smallest

MB = 64
OF_A_COPY = 2.0
"""Upper limit of the stall of training, in durations of a copy. torch.save into memory takes four times as long or
more.
"""


def state() -> dict[str, Any]:
    layers = {f"layer{k}.weight": torch.randn(MB * 1_000_000 // 4 // 50) for k in range(50)}
    return {"models_state_dict": [layers]}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because the training thread makes the copy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def copy_s(weights: dict[str, torch.Tensor], copies: list[torch.Tensor]) -> float:
    began = time.thread_time()
    for tensor, copy in zip(weights.values(), copies, strict=True):
        ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return time.thread_time() - began


@pytest.mark.integration
def test_training_stands_still_for_little_more_than_a_copy(tmp_path: Path, one_thread: None) -> None:
    """Measured in processor time, relative to a copy at the same moment, because the machine may be shared.
    test_async_save shows that it does not wait for a disk.
    """
    content, context = state(), CheckpointContext(tmp_path, Distributed())
    weights = content["models_state_dict"][0]
    copies = [torch.zeros_like(tensor) for tensor in weights.values()]

    def copies_of_time() -> float:
        began = time.thread_time()
        context.begin(1, {"state_dict.pth": content})
        stall_s = time.thread_time() - began
        context.settled(wait=True)
        return stall_s / copy_s(weights, copies)

    copies_of_time()  # the first save allocates the memory
    assert smallest(copies_of_time, OF_A_COPY) < OF_A_COPY


def test_the_first_save_takes_no_new_memory_while_training_stands_still(tmp_path: Path) -> None:
    content, context = state(), CheckpointContext(tmp_path, Distributed())
    context.allocate({"state_dict.pth": content})
    before = page_faults()
    context.begin(1, {"state_dict.pth": content})
    assert page_faults() - before < 0.05 * MB * 1_000_000 / mmap.PAGESIZE
    context.settled(wait=True)


def page_faults() -> int:
    """Return the number of page faults of this thread that read no disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def bytes_read() -> int:
    """Return the bytes that system calls of this process have read, from any source (proc(5))."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_what_is_verified_is_not_read_again_to_be_loaded(tmp_path: Path) -> None:
    content, context = state(), CheckpointContext(tmp_path, Distributed())
    context.save(1, {"state_dict.pth": content})
    (checkpoint,) = committed(tmp_path)
    before = bytes_read()
    found = context.newest(lambda name: True)
    assert found is not None
    loaded = stored_state(found[0])
    assert (bytes_read() - before) / checkpoint.size_bytes < 1.05
    weights = content["models_state_dict"][0]
    assert all(torch.equal(value, weights[name]) for name, value in loaded["models_state_dict"][0].items())
