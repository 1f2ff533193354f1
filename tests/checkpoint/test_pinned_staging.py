from __future__ import annotations

import errno
import io
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_det.checkpoint import pinned_staging
from hpc_det.checkpoint.pinned_staging import PinnedStaging, StagingFull, copy_storages
from hpc_det.node import full_disk
from tests.facts import refused


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def everything() -> dict[str, Any]:
    """Return one of each kind of content that a checkpoint may hold."""
    tied = torch.randn(10)
    shared = [1, 2]
    model = torch.nn.Linear(3, 4)
    return {
        "model": model.state_dict(),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4)}}, "param_groups": [{}]},
        "tied": [tied, tied[2:5], tied.view(2, 5).t()],
        "parameters": (torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(3), requires_grad=False)),
        "leaf": torch.randn(2).requires_grad_(),
        "types": {name: torch.ones(3, dtype=getattr(torch, name)) for name in ("bfloat16", "bool", "int64", "cfloat")},
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.randn(3, dtype=torch.cfloat).conj(),
        "array": np.arange(4.0),
        "plain": {1: shared, "again": shared, "size": torch.Size([2, 3]), "type": torch.float16, "none": None},
    }


def test_a_copy_is_saved_as_the_original_byte_for_byte() -> None:
    content = everything()
    conjugate = content.pop("conjugate")
    copied = PinnedStaging().copy(content)
    assert saved(copied) == saved(content)
    assert torch.equal(PinnedStaging().copy(conjugate), conjugate)


def test_what_training_changes_does_not_change_the_copy() -> None:
    content = everything()
    copied = PinnedStaging().copy(content)
    before = saved(copied)
    with torch.no_grad():
        content["tied"][0].zero_()
        content["model"]["weight"].zero_()
    content["array"][:] = 7
    content["plain"][1].append(3)
    assert saved(copied) == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensors_are_copied_too() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    copied = PinnedStaging().copy([nested])[0]
    nested.zero_()
    assert [part.tolist() for part in copied.unbind()] == [[1, 1], [1, 1, 1]]


@pytest.mark.parametrize("in_folder", [False, True])
def test_the_next_copy_is_in_the_same_memory(tmp_path: Path, in_folder: bool) -> None:
    copies = PinnedStaging(tmp_path if in_folder else None)
    places = [copies.copy({"a": torch.full((1000,), number)})["a"].data_ptr() for number in range(3)]
    assert len(set(places)) == 1
    larger = copies.copy([torch.ones(5000), torch.ones(2000)])
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in larger)
    assert [*tmp_path.iterdir()] == [], "the file has no name"


def test_what_was_expected_has_its_memory_when_it_comes() -> None:
    """Content that is larger than expected allocates memory only for the excess."""
    copies, content = PinnedStaging(), [torch.randn(7), torch.randn(3_000_000)]
    copies.allocate(content[1:])
    copies.allocate(content)
    faults = page_faults()
    copied = copies.copy(content)
    assert page_faults() - faults < 200, "12 MB are 2,930 pages"
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copied, content, strict=True))
    places = [copy.data_ptr() for copy in copied]
    more = copies.copy([*content, torch.ones(100_000)])
    assert [copy.data_ptr() for copy in more[:2]] == places
    assert more[2].sum() == 100_000


def page_faults() -> int:
    """Return the number of page faults of this thread that read no disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_keeps_the_place_of_copies_free_and_costs_no_page() -> None:
    """Otherwise freeing the copies would unmap whatever has been mapped there since, and the process would get a
    SIGSEGV.
    """
    copies, content = PinnedStaging(), [torch.ones(3_000_000)]
    place = copies.copy(content)[0].data_ptr()
    if not (child := os.fork()):
        try:
            os._exit(0 if is_mapped(place) else 1)
        finally:
            os._exit(2)
    faults = page_faults()
    copies.copy(content)
    assert page_faults() - faults < 1500, "12 MB are 2,930 pages; some are Python's own"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_mapped(address: int) -> bool:
    """Return whether the address is mapped in this process (proc(5))."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


def test_copies_that_differ_each_time_end_in_one_chunk() -> None:
    copies = PinnedStaging()
    for size in range(1, 12):
        (copied,) = copies.copy([torch.full((size * 1000,), size)])
        assert (copied == size).all()
        assert len(copies._chunks) <= 5


def test_what_is_copied_also_does_not_take_the_place_of_what_is() -> None:
    copies = PinnedStaging()
    copies.allocate([torch.randn(10)])
    parts = [
        copies.copy(torch.full((10,), 0)),
        *(copies.copy_more(torch.full((size,), size)) for size in (3, 5000, 7, 9)),
    ]
    assert [part.unique().tolist() for part in parts] == [[0], [3], [5000], [7], [9]]


def test_a_full_disk_shows_before_anything_is_copied(tmp_path: Path) -> None:
    more_than_any_disk_has = torch.empty(1 << 55, dtype=torch.uint8, device="meta").untyped_storage()
    with refused(StagingFull, f"{tmp_path}: checkpoint_staging", f"{1 << 55} bytes") as error:
        PinnedStaging(tmp_path)._new_chunk([more_than_any_disk_has])
    assert full_disk.cause_in(error.value) is None


def test_a_full_folder_of_a_node_is_no_full_disk_that_the_job_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StagingFull) as error:
        PinnedStaging(tmp_path).copy([torch.zeros(10)])
    assert full_disk.cause_in(error.value) is None
    assert list(tmp_path.iterdir()) == []


PART = pinned_staging._PART
SIZES = [0, 1, 17, PART - 1, PART, PART + 1, 9 * PART + 5]


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_byte_is_copied_with_any_number_of_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    sources = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]
    copies = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    copy_storages([(source.untyped_storage(), copy) for source, copy in zip(sources, copies, strict=True)])
    assert all(torch.equal(source, copy) for source, copy in zip(sources, copies, strict=True))


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("size", "torchs", "started"), [(20 * PART, 1, 0), (20 * PART, 3, 2), (20 * PART, 50, 3), (PART - 1, 3, 0)]
)
def test_a_rank_starts_no_more_threads_than_torch_may_use_and_memory_is_worth(
    monkeypatch: pytest.MonkeyPatch, size: int, torchs: int, started: int
) -> None:
    torch.set_num_threads(torchs)
    threads: list[threading.Thread] = []

    def thread(**how: object) -> threading.Thread:
        threads.append(threading.Thread(**how))  # type: ignore[arg-type]
        return threads[-1]

    monkeypatch.setattr(pinned_staging, "Thread", thread)
    source = torch.ones(size, dtype=torch.uint8)
    copy_storages([(source.untyped_storage(), torch.empty_like(source))])
    assert len(threads) == started
    assert not any(each.is_alive() for each in threads)


@pytest.mark.usefixtures("torch_threads")
def test_no_thread_copies_on_when_the_copy_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the caller may free the memory."""
    torch.set_num_threads(3)
    threads: list[threading.Thread] = []

    class Few(threading.Thread):
        def start(self) -> None:
            if threads:
                raise RuntimeError("can't start new thread")
            threads.append(self)
            super().start()

    monkeypatch.setattr(pinned_staging, "Thread", Few)
    source = torch.ones(20 * PART, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        copy_storages([(source.untyped_storage(), torch.empty_like(source))])
    assert [each.is_alive() for each in threads] == [False]
