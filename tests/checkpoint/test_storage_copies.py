from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from hpc_det.checkpoint import storage_copies
from hpc_det.checkpoint.storage_copies import copy_storages

PART = storage_copies._PART
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

    monkeypatch.setattr(storage_copies, "Thread", thread)
    source = torch.ones(size, dtype=torch.uint8)
    copy_storages([(source.untyped_storage(), torch.empty_like(source))])
    assert len(threads) == started
    assert not any(each.is_alive() for each in threads)


@pytest.mark.usefixtures("torch_threads")
def test_no_thread_copies_on_when_the_copy_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may be freed then."""
    torch.set_num_threads(3)
    threads: list[threading.Thread] = []

    class Few(threading.Thread):
        def start(self) -> None:
            if threads:
                raise RuntimeError("can't start new thread")
            threads.append(self)
            super().start()

    monkeypatch.setattr(storage_copies, "Thread", Few)
    source = torch.ones(20 * PART, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        copy_storages([(source.untyped_storage(), torch.empty_like(source))])
    assert [each.is_alive() for each in threads] == [False]
