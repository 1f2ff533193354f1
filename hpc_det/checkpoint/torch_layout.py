"""A file as torch.save writes it, laid out before its tensors are copied: each goes once, straight to its place.

torch.save copies each tensor by itself into whatever it writes to, and from a GPU through memory of its own. Here it
writes everything but the storages (torch.serialization.skip_data), and the gaps that it leaves say where they belong.
"""

from __future__ import annotations

import copyreg
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from hpc_det.checkpoint.pinned_staging import copy_storages
from hpc_det.errors import HpcDetError


@dataclass(frozen=True)
class FileLayout:
    """Where everything is in a file that torch.save would write."""

    size: int
    parts: list[tuple[int, bytes]]
    """All that is no storage, by offset."""
    storages: list[tuple[int, torch.UntypedStorage]]
    """By offset; they are the content's own, and may still change."""

    def fill(self, memory: torch.Tensor) -> None:
        """Write the file into `memory`: uint8, on the CPU, of at least `size` bytes, pinned for copies from a GPU."""
        view = memory.numpy().data
        for offset, part in self.parts:
            view[offset : offset + len(part)] = part
        copy_storages([(storage, memory[offset : offset + storage.nbytes()]) for offset, storage in self.storages])


def layout_of(content: Any) -> FileLayout:
    """What torch.save(content) would write; nothing of a tensor is read.

    Raises what torch.save raises, and RuntimeError for quantized and nested tensors, which it cannot lay out.
    """
    file, storages = _File(), dict[str, torch.UntypedStorage]()
    with torch.serialization.skip_data():
        torch.save(content, file, pickle_module=_noting(storages))  # type: ignore[arg-type]
    filled = [storage for storage in storages.values() if storage.nbytes()]
    if [storage.nbytes() for storage in filled] != [size for _, size in file.gaps]:
        raise HpcDetError(
            f"torch {torch.__version__} lays out a file in another way than this version of hpc_det knows; install "
            f"an older torch"
        )
    places = (offset for offset, _ in file.gaps)
    return FileLayout(file.offset, file.parts, list(zip(places, filled, strict=True)))


class _File:
    """What torch.save writes to: it writes what it has, and seeks over the data that it skips."""

    def __init__(self) -> None:
        self.offset = 0
        self.parts: list[tuple[int, bytes]] = []
        self.gaps: list[tuple[int, int]] = []
        """Offset and size of each storage that is not empty, in the order in which they were pickled."""

    def write(self, data: memoryview) -> int:
        self.parts.append((self.offset, bytes(data)))
        self.offset += data.nbytes
        return data.nbytes

    def seek(self, size: int, whence: int) -> int:
        assert whence == 1, f"torch.save seeks with whence {whence}"
        self.gaps.append((self.offset, size))
        self.offset += size
        return self.offset

    def flush(self) -> None:
        pass


_STORAGES = (torch.UntypedStorage, torch.storage.TypedStorage)


def _noting(storages: dict[str, torch.UntypedStorage]) -> Any:
    """A pickle module for torch.save, which notes each storage by the key that it gets in the file.

    torch.save derives a pickler of its own from it, whose `persistent_id` gives out the keys. It would be asked of
    everything, twenty times a tensor.
    """

    class Pickler(pickle.Pickler):
        dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}

        def __init_subclass__(cls) -> None:
            key_of = cls.persistent_id

            def persistent_id(self: Any, each: Any) -> Any:
                if not isinstance(each, _STORAGES):
                    return None
                said = key_of(self, each)
                storages[said[2]] = each if isinstance(each, torch.UntypedStorage) else each._untyped_storage
                return said

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return SimpleNamespace(__name__=pickle.__name__, Pickler=Pickler)


def _reduced(tensor: torch.Tensor) -> Any:
    """What `__reduce_ex__` says of a tensor that is its numbers and no more, which takes that three times as long."""
    is_special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__
    if is_special or tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    storage = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    )
    hooks: OrderedDict[int, Any] = OrderedDict()
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return torch._utils._rebuild_tensor_v2, (storage, *place, tensor.requires_grad, hooks)
