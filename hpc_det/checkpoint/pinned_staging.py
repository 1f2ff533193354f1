"""Copies of what is saved, in memory that is kept for the next save.

Training waits for these copies alone. Fresh memory would cost more than the copy: the kernel hands it out page by page.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.cuda import cudart

_ALIGNMENT = 512
"""Bytes; more than any type needs, and what copies from a GPU like."""
_ROWS = (list, tuple, set)
_CHUNKS = 4
"""Where copies differ so much that there are more, one new chunk replaces them."""
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK (madvise(2)), which mmap does not name. Without it, a fork makes each page be copied once more.

With MADV_DONTFORK a worker that frees its mmap unmaps whatever has taken that place in its memory.
"""
_Storages = dict[int, torch.UntypedStorage]


class PinnedStaging:
    """Memory of one rank for copies of what it saves; one copy at a time.

    The memory is in chunks: where a copy needs more than there is, a chunk is added for the rest.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: on the node's own disk, where the copies are in a file without a name, which the kernel may write
        out when memory is short; None: in memory.
        """
        self._folder = folder
        self._chunks: list[_Chunk] = []
        self._allocating: Thread | None = None

    def allocate(self, *contents: Any) -> None:
        """Allocate memory for copies of `contents`, in a thread. Not while a copy is in use.

        The contents are copied one by one: tensors that share memory share it in the copy of one content only.
        """
        self._begin_anew()
        homeless = [storage for content in contents for storage in self._placed(_storages(content))[1].values()]
        if homeless:
            chunk = self._new_chunk(homeless)
            self._allocating = Thread(target=chunk.fault_in, name="allocate", daemon=True)
            self._allocating.start()

    def copy(self, content: Any) -> Any:
        """Return `content` with copies of all tensors, on the CPU. It is good until the next call.

        Tensors that share memory go on to share it. `content` holds what a checkpoint may hold (check_loadable).
        """
        self._begin_anew()
        return self.copy_more(content)

    def copy_more(self, content: Any) -> Any:
        """Copy something more, which is good as long as the last `copy`. `content` may hold other objects, too."""
        storages = _storages(content)
        places = self._places(storages)
        copy_storages([(storages[key], place) for key, place in places.items()])
        copies = {key: place.untyped_storage() for key, place in places.items()}
        same = {id(tensor): _like(tensor, copies) for tensor in _tensors(content)}
        return copy.deepcopy(content, same)

    def _begin_anew(self) -> None:
        """All memory is free again."""
        if self._allocating:
            self._allocating.join()
            self._allocating = None
        if len(self._chunks) > _CHUNKS:
            for chunk in self._chunks:
                chunk.unpin()
            self._chunks.clear()
        for chunk in self._chunks:
            chunk.used = 0

    def _places(self, storages: _Storages) -> dict[int, torch.Tensor]:
        places, homeless = self._placed(storages)
        if homeless:
            chunk = self._new_chunk(homeless.values())
            chunk.fault_in()
            places |= {key: chunk.take(storage.nbytes()) for key, storage in homeless.items()}
        return places

    def _placed(self, storages: _Storages) -> tuple[dict[int, torch.Tensor], _Storages]:
        """A place for each, the largest first, and those for which there is none."""
        places, homeless = {}, {}
        for key, storage in sorted(storages.items(), key=lambda item: -item[1].nbytes()):
            chunk = next((each for each in self._chunks if each.has_room(storage.nbytes())), None)
            if chunk:
                places[key] = chunk.take(storage.nbytes())
            else:
                homeless[key] = storage
        return places, homeless

    def _new_chunk(self, storages: Iterable[torch.UntypedStorage]) -> _Chunk:
        """With room for these. Raises StagingFull where the folder has none."""
        size = sum(_aligned(storage.nbytes()) for storage in storages)
        chunk = _Chunk(_new_memory(self._folder, max(size, mmap.PAGESIZE)))
        self._chunks.append(chunk)
        return chunk


class StagingFull(RuntimeError):
    """In the staging folder of a node. It is no error of the user's, since elsewhere there may be room; and no full
    disk, whose space somebody may free: the job would wait for that for ever.
    """


class _Chunk:
    """Memory, of which the first `used` bytes are in use."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.used = 0
        self._memory = memory
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        """Of the thread that copies."""
        self._is_pinned = False

    def has_room(self, size: int) -> bool:
        return self.used + size <= len(self._memory)

    def take(self, size: int) -> torch.Tensor:
        place = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self.used)
        self.used += _aligned(size)
        return place

    def fault_in(self) -> None:
        """Have the kernel hand out its pages."""
        ctypes.memset(_address(self._memory), 0, len(self._memory))
        if self._gpu is not None:
            with torch.cuda.device(self._gpu):  # another thread would take memory of the first one, for every rank
                self._is_pinned = _pin(self._memory)

    def unpin(self) -> None:
        if self._is_pinned:
            _unpin(self._memory)


def _new_memory(folder: Path | None, size: int) -> mmap.mmap:
    """Raises StagingFull: a full disk shows here, and kills nobody later."""
    if folder is None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(_WIPE_ON_FORK)
        except OSError:  # before Linux 4.14
            memory.madvise(mmap.MADV_DONTFORK)
        return memory
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        problem = error.strerror
    # Not in the handler: what comes from a full disk is not charged, and waits for space.
    raise StagingFull(
        f"{folder}: checkpoint_staging has no room on {socket.gethostname()} for a copy of {size} bytes of what is "
        f"saved: {problem}, {shutil.disk_usage(folder).free} are free; name another folder, or leave it out"
    )


def _pin(memory: mmap.mmap) -> bool:
    """For copies from a GPU, which are slower without; the system may allow less memory than that."""
    return cudart().cudaHostRegister(_address(memory), len(memory), 0) == 0  # type: ignore[no-untyped-call, no-any-return]


def _unpin(memory: mmap.mmap) -> None:
    cudart().cudaHostUnregister(_address(memory))  # type: ignore[no-untyped-call]


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _storages(content: Any) -> _Storages:
    """Of all its tensors, each once."""
    found = (_storage(tensor) for tensor in _tensors(content))
    return {each._cdata: each for each in found if each is not None and each.nbytes()}


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        if not content.is_meta:  # which has a shape, and nothing to copy
            yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, _ROWS):
        for value in content:
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None for kinds of tensors that are more than one."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return None if not is_plain or tensor.is_quantized or tensor.is_nested else tensor.untyped_storage()


def _like(tensor: torch.Tensor, copies: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    """`tensor`, but in the copy of its storage."""
    storage = _storage(tensor)
    if storage is None or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)
    place = copies.get(storage._cdata) or torch.empty(0).untyped_storage()
    same = torch.empty(0, dtype=tensor.dtype).set_(place, tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(same, tensor.requires_grad)
    return same.requires_grad_(tensor.requires_grad)


# --- copies by several threads

_PART = 1 << 20
"""Bytes that a thread copies at a time. Smaller storages are left to the caller: threads would wait for the GIL."""
_THREADS = 4
"""At most: a few use all that memory can do."""
_Part = tuple[int, int, int]
"""Target, source, bytes: what memmove takes."""


def copy_storages(pairs: Sequence[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
    """Copy each storage into its uint8 tensor on the CPU, with as many threads as torch may use on this rank.

    torch's own copy gives each core the same share, and waits for a core that others keep busy.
    """
    for storage, to in pairs:
        if storage.device.type != "cpu":
            to.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), non_blocking=True)
    on_cpu = [(storage, to) for storage, to in pairs if storage.device.type == "cpu"]
    large = [part for storage, to in on_cpu if storage.nbytes() >= _PART for part in _parts(storage, to)]
    small = [part for storage, to in on_cpu if storage.nbytes() < _PART for part in _parts(storage, to)]
    left = iter(large)
    others = min(torch.get_num_threads(), _THREADS, len(large)) - 1
    threads = [Thread(target=_copy, args=(left,), name="copy", daemon=True) for _ in range(others)]
    try:
        for thread in threads:
            thread.start()
        _copy(small)
        _copy(left)
    finally:  # the threads use memory that may be freed when this returns
        deque(left, maxlen=0)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if any(storage.device.type == "cuda" for storage, _ in pairs):
        torch.cuda.synchronize()


def _parts(storage: torch.UntypedStorage, to: torch.Tensor) -> Iterator[_Part]:
    source, target, size = storage.data_ptr(), to.data_ptr(), storage.nbytes()
    for offset in range(0, size, _PART):
        yield target + offset, source + offset, min(_PART, size - offset)


def _copy(parts: Iterable[_Part]) -> None:
    """Copy each part that no other thread has taken from the same iterator."""
    for part in parts:
        ctypes.memmove(*part)
