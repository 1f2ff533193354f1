"""External loaders: loaders other than hpc_det's, and the parts of torch's loaders that a resume needs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpc_det.core.loader_workers import end_workers, shield, with_live_workers


def length_of(loader: object) -> int | None:
    """Return len(loader); None if it has none, such as torch's loader of an IterableDataset without a length."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    inner = torch_loader_of(loader)
    if inner is not None:
        # Once len() was called, torch warns at every batch beyond it; training continues beyond it.
        inner._IterableDataset_len_called = None
    return length


def torch_loader_of(loader: object) -> DataLoader[Any] | None:
    """Return the torch DataLoader that reads the records: `loader`, or the one inside a loader of accelerate."""
    if not isinstance(loader, DataLoader):
        return None
    # A loader of accelerate claims to be a DataLoader and forwards what is read from it, but not what is set.
    inner = vars(loader).get("base_dataloader", loader)
    return inner if isinstance(inner, DataLoader) else None


class ExternalLoader:
    """An external loader and the open iterator over it."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._torch_loader = torch_loader_of(loader)
        self._iterator: Iterator[Any] | None = None
        self.loads_in_workers = bool(getattr(loader, "num_workers", 0))
        shield(self._torch_loader)

    def close(self) -> None:
        """End the worker processes. The loader can be iterated again afterwards."""
        end_workers(self._iterator)
        self._iterator = None
        if self._torch_loader is not None:  # torch keeps the iterator of persistent workers
            end_workers(self._torch_loader._iterator)
            self._torch_loader._iterator = None

    def _begin(self) -> Iterator[Any]:
        """Return a new iterator. The previous one is ended, unless torch reuses it, as with persistent workers."""
        begin = functools.partial(iter, self._loader)
        iterator: Iterator[Any] = (
            begin() if self._torch_loader is None else with_live_workers(self._torch_loader, begin)
        )
        if iterator is not self._iterator:
            end_workers(self._iterator)
        self._iterator = iterator
        return iterator


def generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators of the loader and its samplers, each once: torch passes the loader's to its samplers."""
    found = (getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader)))
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def set_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` of the sampler and of the samplers inside it."""
    for one in (sampler, *samplers_of(sampler)):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)


def samplers_of(owner: Any) -> list[Any]:
    """Return the samplers inside a loader or a sampler, each once: torch's and accelerate's attributes for them."""
    found: dict[int, Any] = {}
    owners = [owner]
    while owners:
        one = owners.pop(0)
        for inner in (getattr(one, name, None) for name in ("batch_sampler", "sampler")):
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                owners.append(inner)
    return list(found.values())
