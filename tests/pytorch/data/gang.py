"""Simulate all ranks of a gang in one process: each receives at once the messages that the other ranks would send."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.data.batch_shapes import shape_of

Data = TypeVar("Data")


@dataclass(frozen=True, kw_only=True)
class Gang(Distributed):
    gathered: Sequence[Any] = ()

    def gather_json(self, data: Any) -> list[Any]:
        assert json.loads(json.dumps(data)) == self.gathered[self.rank]
        return [*self.gathered]


def by_ranks(
    make: Callable[..., Data], *loaders: Any, parts: Sequence[int] | None = None, **options: Any
) -> list[Data]:
    """Return the data that `make` (training_data or validation_data) creates for each rank. `parts`: data-parallel
    ranks.
    """
    parts = parts or range(len(loaders))
    shapes = [None if loader is None else asdict(shape_of(loader)) for loader in loaders]
    gathered = json.loads(json.dumps([*zip(parts, shapes, strict=True)]))
    return [
        make(
            loader,
            rank=part,
            size=max(parts) + 1,
            seed=3,
            gang=Gang(rank=rank, size=len(loaders), gathered=gathered),
            **options,
        )
        for rank, (loader, part) in enumerate(zip(loaders, parts, strict=True))
    ]
