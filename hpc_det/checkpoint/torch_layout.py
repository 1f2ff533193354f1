"""The layout of a file of torch.save, computed before its tensors are copied, so that each is copied only once.

torch.save copies tensors one at a time, and those of a GPU through an additional buffer. Here it writes everything but
the storages (torch.serialization.skip_data), and leaves gaps for them. Then the storages are copied into the gaps.

This depends on details of torch.save that no documentation promises. `is_supported` tries them with a small file, so
that a torch with other details is used through torch.save itself.
"""

from __future__ import annotations

import copyreg
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import torch

from hpc_det.checkpoint.pinned_staging import copy_storages


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file that torch.save would write."""

    size: int
    """Size of the file in bytes."""
    parts: list[tuple[int, bytes]]
    """Offset and content of everything but the storages."""
    storages: list[tuple[int, torch.UntypedStorage]]
    """Offset of each storage; not a copy: training may still change it."""

    def fill(self, memory: torch.Tensor) -> None:
        """Write the file into `memory`, a uint8 tensor on the CPU with at least `size` bytes.

        Pinned memory is fastest for storages on a GPU.
        """
        view = memory.numpy().data
        for offset, part in self.parts:
            view[offset : offset + len(part)] = part
        copy_storages([(storage, memory[offset : offset + storage.nbytes()]) for offset, storage in self.storages])


def layout_of(content: Any) -> FileLayout:
    """Return the layout of the file that torch.save(content) would write, without reading any tensor data.

    Raises the exceptions of torch.save, and RuntimeError for quantized and nested tensors, which are not supported, and
    if this torch writes its files in another order.
    """
    file, storages = _File(), dict[str, torch.UntypedStorage]()
    with torch.serialization.skip_data():
        torch.save(content, file, pickle_module=_noting(storages))  # type: ignore[arg-type]
    filled = [storage for storage in storages.values() if storage.nbytes()]
    # torch writes the storages in the order in which it pickled them; make sure that this version does, too
    if [storage.nbytes() for storage in filled] != [size for _, size in file.gaps]:
        raise RuntimeError(f"torch {torch.__version__} writes storages in another order than it pickles them")
    places = (offset for offset, _ in file.gaps)
    return FileLayout(file.offset, file.parts, list(zip(places, filled, strict=True)))


@cache
def is_supported() -> bool:
    """Return whether `layout_of` knows the layout of this torch's files, and print a line if it does not."""
    weights = torch.arange(6.0).reshape(2, 3)
    sample = {"weights": weights, "transposed": weights.t(), "count": torch.tensor(3), "none": torch.empty(0), "n": 1}
    try:
        layout = layout_of(sample)
        memory = torch.zeros(layout.size, dtype=torch.uint8)
        layout.fill(memory)
        found = torch.load(BytesIO(memory.numpy().tobytes()), weights_only=True)
        reason = "" if _is_equal(found, sample) else "a file of its layout is read with other values"
    except Exception as error:  # of any kind: it depends on what another torch has changed
        reason = f"{type(error).__name__}: {error}"
    if reason:
        print(
            f"hpc-det: torch {torch.__version__} has a file layout that this version of hpc_det does not know "
            f"({reason}); snapshots are written by torch.save, which takes longer",
            flush=True,
        )
    return not reason


def _is_equal(found: dict[str, Any], sample: dict[str, Any]) -> bool:
    return found.keys() == sample.keys() and all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in sample.items()
    )


class _File:
    """A file object for torch.save, which writes everything but the storages, and seeks over their gaps."""

    def __init__(self) -> None:
        self.offset = 0
        self.parts: list[tuple[int, bytes]] = []
        self.gaps: list[tuple[int, int]] = []
        """Offset and size in bytes of each storage that is not empty, in the order of pickling."""

    def write(self, data: memoryview) -> int:
        self.parts.append((self.offset, bytes(data)))
        self.offset += data.nbytes
        return data.nbytes

    def seek(self, size: int, whence: int) -> int:
        assert whence == 1, f"torch.save seeks with whence {whence}"  # relative to the current position
        self.gaps.append((self.offset, size))
        self.offset += size
        return self.offset

    def flush(self) -> None:
        pass


_STORAGES = (torch.UntypedStorage, torch.storage.TypedStorage)


def _noting(storages: dict[str, torch.UntypedStorage]) -> Any:
    """Return a pickle module for torch.save that adds each storage to `storages`, under its key in the file.

    torch.save subclasses its Pickler with a `persistent_id` that assigns the keys.
    """

    class Pickler(pickle.Pickler):
        dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}

        def __init_subclass__(cls) -> None:
            key_of = cls.persistent_id

            def persistent_id(self: Any, each: Any) -> Any:
                # torch's method is slow, and pickle calls this for every object: about twenty times per tensor
                if not isinstance(each, _STORAGES):
                    return None
                identity = key_of(self, each)  # ("storage", type, key, device, number of elements)
                storages[identity[2]] = each if isinstance(each, torch.UntypedStorage) else each._untyped_storage
                return identity

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return SimpleNamespace(__name__=pickle.__name__, Pickler=Pickler)


def _reduced(tensor: torch.Tensor) -> Any:
    """Return `tensor.__reduce_ex__()`, computed three times as fast for a tensor without special attributes."""
    is_special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__
    if is_special or tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    storage = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    )
    hooks: OrderedDict[int, Any] = OrderedDict()
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return torch._utils._rebuild_tensor_v2, (storage, *place, tensor.requires_grad, hooks)
