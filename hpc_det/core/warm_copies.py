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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.cuda import cudart

from hpc_det.core.laid_out import copy_bytes

_ALIGNMENT = 512
"""Bytes; more than any type needs, and what copies from a GPU like."""
_ROWS = (list, tuple, set)


class WarmCopies:
    """Of one rank; one copy at a time."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: on the node's own disk, where the copies are in a file without a name, which the kernel may write
        out when memory is short; None: in memory.
        """
        self._folder = folder
        self._memory: mmap.mmap | None = None
        self._gpu: int | None = None
        """Of the thread that copies."""
        self._is_pinned = False
        self._warming: Thread | None = None
        self._others: list[WarmCopies] = []
        self._others_used = 0

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have memory for copies of these, by and by."""
        size = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if size > self._size:
            self._make(size)
            self._warming = Thread(target=self._touch, name="warm", daemon=True)
            self._warming.start()

    def of(self, content: Any) -> Any:
        """The same with copies of all tensors, on the CPU. It is good until the next call.

        Tensors that share memory go on to share it. `content` holds what a checkpoint may hold (check_loadable).
        """
        self._others_used = 0
        tensors = {id(tensor): tensor for tensor in _tensors(content)}
        storages = {each._cdata: each for each in map(_storage, tensors.values()) if each is not None and each.nbytes()}
        room = self._room(sum(_aligned(storage.nbytes()) for storage in storages.values()))
        copies, offset = {}, 0
        for key, storage in storages.items():
            place = torch.frombuffer(room, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
            copy_bytes(storage, place)
            copies[key] = place.untyped_storage()
            offset += _aligned(storage.nbytes())
        same = {number: _like(tensor, copies) for number, tensor in tensors.items()}
        if any(storage.device.type == "cuda" for storage in storages.values()):
            torch.cuda.synchronize()
        return copy.deepcopy(content, same)

    def also(self, content: Any) -> Any:
        """`of` something more, which is good as long as the former. `content` may hold other objects, too."""
        if self._others_used == len(self._others):
            self._others.append(WarmCopies(self._folder))
        self._others_used += 1
        return self._others[self._others_used - 1].of(content)

    @property
    def _size(self) -> int:
        return len(self._memory) if self._memory else 0

    def _room(self, size: int) -> mmap.mmap:
        self._await_warm()
        if self._memory is None or size > self._size:
            self._make(size)
            self._touch()
        assert self._memory is not None
        return self._memory

    def _await_warm(self) -> None:
        if self._warming:
            self._warming.join()
            self._warming = None

    def _make(self, size: int) -> None:
        self._await_warm()
        if self._memory and self._is_pinned:
            _unpin(self._memory)
        self._memory = self._new_memory(max(size, mmap.PAGESIZE))
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._memory.madvise(mmap.MADV_DONTFORK)  # a loader's workers would make each page be copied once more

    def _touch(self) -> None:
        """Have the kernel hand out its pages."""
        assert self._memory is not None
        ctypes.memset(_address(self._memory), 0, len(self._memory))
        if self._gpu is not None:
            with torch.cuda.device(self._gpu):  # another thread would take memory of the first one, for every rank
                self._is_pinned = _pin(self._memory)

    def _new_memory(self, size: int) -> mmap.mmap:
        """Raises OSError where the folder has no room for it."""
        if self._folder:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                _take_room(self._folder, file.fileno(), size)
                return mmap.mmap(file.fileno(), size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _take_room(folder: Path, file: int, size: int) -> None:
    """A full disk shows here, and kills nobody later."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        said = (
            f"checkpoint_staging has no room on {socket.gethostname()} for a copy of {size} bytes of what is saved: "
            f"{error.strerror}, {shutil.disk_usage(folder).free} are free; name another folder, or leave it out"
        )
        raise OSError(error.errno, said, str(folder)) from None  # no error of the user's: elsewhere there may be room


def _pin(memory: mmap.mmap) -> bool:
    """For copies from a GPU, which are slower without; the system may allow less memory than that."""
    return cudart().cudaHostRegister(_address(memory), len(memory), 0) == 0  # type: ignore[no-untyped-call, no-any-return]


def _unpin(memory: mmap.mmap) -> None:
    cudart().cudaHostUnregister(_address(memory))  # type: ignore[no-untyped-call]


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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
