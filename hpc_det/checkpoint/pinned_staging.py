"""Copies of the saved objects, in memory that is reused for the next save.

Training waits only for these copies. Fresh memory would cost more time than the copy, because the kernel handles a page
fault for each page of it.
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
"""Alignment of each copy in bytes; more than any dtype needs, and suitable for copies from a GPU."""
_ROWS = (list, tuple, set)
_CHUNKS = 4
"""Largest number of chunks that are kept; if there are more, one new chunk replaces all of them."""
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK (madvise(2)), for which the mmap module has no name."""
_Place = tuple[int, int]
"""Address and size in bytes of a storage: several tensors may share it, and none has a public identity."""
_Storages = dict[_Place, torch.UntypedStorage]


class PinnedStaging:
    """Memory of one rank for copies of what it saves; one copy at a time.

    The memory consists of chunks. When a copy needs more than they have, a chunk is added for the rest.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: on a local disk of the node, for copies in a mapped file without a name; None: in memory.

        The kernel can write the pages of a file to the disk when memory is short.
        """
        self._folder = folder
        self._chunks: list[_Chunk] = []
        self._allocating: Thread | None = None

    def allocate(self, *contents: Any) -> None:
        """Allocate memory for copies of `contents`, in a thread. Not while a copy is in use.

        Each of the contents gets its own copies: tensors that share memory share it only within one of them.
        """
        self._begin_anew()
        unplaced = [storage for content in contents for storage in self._placed(_storages(content))[1].values()]
        if unplaced:
            chunk = self._new_chunk(unplaced)
            self._allocating = Thread(target=chunk.fault_in, name="allocate", daemon=True)
            self._allocating.start()

    def copy(self, content: Any) -> Any:
        """Return `content` with copies of all tensors, on the CPU. They are valid until the next `copy` or `allocate`.

        Tensors that share memory share it in the copy, too. `content` must be loadable (check_loadable).
        """
        self._begin_anew()
        return self.copy_more(content)

    def copy_more(self, content: Any) -> Any:
        """Return a copy of further content, valid as long as the last `copy`. `content` may contain any objects."""
        storages = _storages(content)
        places = self._places(storages)
        copy_storages([(storages[key], place) for key, place in places.items()])
        copies = {key: place.untyped_storage() for key, place in places.items()}
        same = {id(tensor): _like(tensor, copies) for tensor in _tensors(content)}  # deepcopy's memo
        return copy.deepcopy(content, same)

    def _begin_anew(self) -> None:
        """Mark all memory as free."""
        if self._allocating:
            self._allocating.join()
            self._allocating = None
        if len(self._chunks) > _CHUNKS:
            for chunk in self._chunks:
                chunk.unpin()
            self._chunks.clear()
        for chunk in self._chunks:
            chunk.used = 0

    def _places(self, storages: _Storages) -> dict[_Place, torch.Tensor]:
        places, unplaced = self._placed(storages)
        if unplaced:
            chunk = self._new_chunk(unplaced.values())
            chunk.fault_in()
            places |= {key: chunk.take(storage.nbytes()) for key, storage in unplaced.items()}
        return places

    def _placed(self, storages: _Storages) -> tuple[dict[_Place, torch.Tensor], _Storages]:
        """Return a place in the chunks for each storage that fits, and the storages that do not fit."""
        places, unplaced = {}, {}
        # the largest first: small ones fit into what is left of a chunk
        for key, storage in sorted(storages.items(), key=lambda item: -item[1].nbytes()):
            chunk = next((each for each in self._chunks if each.has_room(storage.nbytes())), None)
            if chunk:
                places[key] = chunk.take(storage.nbytes())
            else:
                unplaced[key] = storage
        return places, unplaced

    def _new_chunk(self, storages: Iterable[torch.UntypedStorage]) -> _Chunk:
        """Return a new chunk with room for `storages`. Raises StagingFull if the folder has not enough space."""
        size = sum(_aligned(storage.nbytes()) for storage in storages)
        chunk = _Chunk(_new_memory(self._folder, max(size, mmap.PAGESIZE)))
        self._chunks.append(chunk)
        return chunk


class StagingFull(RuntimeError):
    """The staging folder of a node has no room for the copies.

    This is not a UsageError, since another node may have room. It is not the error of a full disk either: a job waits
    until space is freed on a full disk, and here it might wait forever.
    """


class _Chunk:
    """A block of memory whose first `used` bytes contain copies."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.used = 0
        self._memory = memory
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        """The current GPU of the thread that copies; None: there is none."""
        self._is_pinned = False

    def has_room(self, size: int) -> bool:
        return self.used + size <= len(self._memory)

    def take(self, size: int) -> torch.Tensor:
        place = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self.used)
        self.used += _aligned(size)
        return place

    def fault_in(self) -> None:
        """Have the kernel allocate all pages, and pin them for copies from a GPU."""
        ctypes.memset(_address(self._memory), 0, len(self._memory))
        if self._gpu is not None:
            # A new thread starts with GPU 0 as its device, where the context of every rank would take memory.
            with torch.cuda.device(self._gpu):
                self._is_pinned = _pin(self._memory)

    def unpin(self) -> None:
        if self._is_pinned:
            _unpin(self._memory)


def _new_memory(folder: Path | None, size: int) -> mmap.mmap:
    """Return `size` bytes of memory, or of a mapped file in `folder`. Raises StagingFull."""
    if folder is None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            # Otherwise a forked process, such as a DataLoader worker, shares the pages, and the next copy into each of
            # them makes the kernel allocate and copy the page first (copy-on-write).
            memory.madvise(_WIPE_ON_FORK)
        except OSError:  # before Linux 4.14
            # Second choice: the worker has nothing mapped at this address, so when it frees its mmap object, it unmaps
            # whatever it has mapped there since.
            memory.madvise(mmap.MADV_DONTFORK)
        return memory
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # reserves the space now: without space for a page of a mapped file, the process would be killed (SIGBUS)
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        problem = error.strerror
    # Not raised in the handler, where it would get the OSError as its context: an error caused by a full disk does not
    # count as a failure, and the job waits for space (full_disk.cause_in).
    raise StagingFull(
        f"{folder}: checkpoint_staging has no room on {socket.gethostname()} for {size} bytes, a copy of the saved "
        f"objects: {problem}, {shutil.disk_usage(folder).free} bytes are free; set another folder, or remove the key"
    )


def _pin(memory: mmap.mmap) -> bool:
    """Pin the memory, which speeds up copies from a GPU; return False if the system's limit is lower."""
    return cudart().cudaHostRegister(_address(memory), len(memory), 0) == 0  # type: ignore[no-untyped-call, no-any-return]


def _unpin(memory: mmap.mmap) -> None:
    cudart().cudaHostUnregister(_address(memory))  # type: ignore[no-untyped-call]


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _storages(content: Any) -> _Storages:
    """Return the storages of all tensors in `content` that are not empty, each once, by address."""
    found = (_storage(tensor) for tensor in _tensors(content))
    return {_place(each): each for each in found if each is not None and each.nbytes()}


def _place(storage: torch.UntypedStorage) -> _Place:
    return storage.data_ptr(), storage.nbytes()


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        if not content.is_meta:  # such a tensor has a shape, but no data
            yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, _ROWS):
        for value in content:
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for tensors that consist of more than one storage, or of a subclass."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return None if not is_plain or tensor.is_quantized or tensor.is_nested else tensor.untyped_storage()


def _like(tensor: torch.Tensor, copies: Mapping[_Place, torch.UntypedStorage]) -> torch.Tensor:
    """Return a tensor like `tensor`, on the CPU, in the copy of its storage."""
    storage = _storage(tensor)
    if storage is None or tensor.is_conj() or tensor.is_neg():  # set_() below cannot make such a tensor
        return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)
    place = copies.get(_place(storage)) or torch.empty(0).untyped_storage()  # empty storages are not copied
    same = torch.empty(0, dtype=tensor.dtype).set_(place, tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(same, tensor.requires_grad)
    return same.requires_grad_(tensor.requires_grad)


# --- copies by several threads

_PART = 1 << 20
"""Bytes that a thread copies at a time."""
_THREADS = 4
"""Largest number of threads; a few saturate the memory bandwidth."""
_Part = tuple[int, int, int]
"""The arguments of memmove: target, source, bytes."""


def copy_storages(pairs: Sequence[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
    """Copy each storage into its uint8 tensor on the CPU, with at most as many threads as torch uses on this rank.

    This is faster than torch's own copy, which gives each core the same share and so waits for a busy one.
    """
    for storage, to in pairs:
        if storage.device.type != "cpu":
            # asynchronous if `to` is pinned; synchronize() is below
            to.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), non_blocking=True)
    on_cpu = [(storage, to) for storage, to in pairs if storage.device.type == "cpu"]
    large = [part for storage, to in on_cpu if storage.nbytes() >= _PART for part in _parts(storage, to)]
    small = [part for storage, to in on_cpu if storage.nbytes() < _PART for part in _parts(storage, to)]
    left = iter(large)  # shared by the threads; small parts are left to the caller, as threads would wait for the GIL
    others = min(torch.get_num_threads(), _THREADS, len(large)) - 1
    threads = [Thread(target=_copy, args=(left,), name="copy", daemon=True) for _ in range(others)]
    try:
        for thread in threads:
            thread.start()
        _copy(small)
        _copy(left)
    finally:  # the threads use memory that may be freed when this returns
        deque(left, maxlen=0)  # after an error: no thread begins another part
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
