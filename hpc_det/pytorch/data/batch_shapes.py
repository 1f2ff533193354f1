"""The shapes of all ranks' loaders, exchanged so that ranks which load nothing count the same epochs as the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hpc_det.core.external_loader import length_of
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError, count
from hpc_det.pytorch.data.data_loader import DataLoader


@dataclass(frozen=True)
class Shape:
    """The attributes of a loader that determine where its epochs and batches end."""

    name: str
    """The items that the loader counts, a plural for messages.

    "records"; "batches" for a batch sampler; OWN for an external loader.
    """
    length: int | None
    """Items per epoch; None if the loader has no length."""
    batch_size: int = 1
    drop_last: bool = False

    def __str__(self) -> str:
        if self.name != "records":
            return f"{'an unknown number of' if self.length is None else self.length} {self.name}"
        records = "an unknown number of records" if self.length is None else count(self.length, "record")
        return f"{records} with batch_size={self.batch_size} and drop_last={self.drop_last}"

    def fits(self, other: Shape) -> bool:
        """Return whether one training may use both. External loaders may differ: the shortest one ends the epoch."""
        return self == other or self.name == other.name == OWN

    def stand_in(self, kind: str) -> DataLoader | Iterable[Any]:
        """Return a loader of this shape that raises UsageError when it loads; `kind`: see `Shapes`."""
        nothing: Any = Nothing(kind, self.length)
        if self.name == OWN:
            return nothing  # type: ignore[no-any-return]
        if self.name == "batches":
            return DataLoader(nothing, batch_sampler=[[0]] * len(nothing))
        return DataLoader(nothing, self.batch_size, drop_last=self.drop_last)


class Nothing:
    """A data set with a length but no data, for a rank that does not load."""

    def __init__(self, kind: str, length: int | None) -> None:
        self._kind = kind
        self._length = length

    def __len__(self) -> int:
        return self._length  # type: ignore[return-value]  # TypeError for None: it has no length

    def __getitem__(self, index: int) -> Any:
        raise UsageError(
            f"build_{self._kind}_data_loader: it returned None on this rank, which asks for a batch; return a loader"
        )


OWN = "batches of its own loader"


def shape_of(loader: DataLoader | Iterable[Any]) -> Shape:
    """Return the shape of a loader. Raises UsageError if the sampler or data set of a DataLoader has no length."""
    if not isinstance(loader, DataLoader):
        return Shape(OWN, length_of(loader))
    items = loader.items(seed=0)
    return Shape(items.name, items.nominal_length, loader.batch_size, loader.drop_last)


class Shapes:
    """The shapes of the loaders of all ranks."""

    def __init__(self, kind: str, by_rank: list[tuple[int, Shape | None]]) -> None:
        """`kind`: "training" or "validation".

        `by_rank`: the data-parallel rank of each rank, and the shape of its loader; None if it has no loader.
        """
        self._kind = kind
        self._by_rank = by_rank
        self.all_load = all(shape for _, shape in by_rank)
        self.lengths = [shape.length for _, shape in by_rank if shape]
        """The lengths on the ranks that load."""

    @classmethod
    def gathered(cls, kind: str, loader: DataLoader | Iterable[Any] | None, rank: int, gang: Distributed) -> Shapes:
        """Return the shapes of all ranks. Collective over `gang`. `rank`: the data-parallel rank."""
        own = None if loader is None else asdict(shape_of(loader))
        return cls(kind, [(part, shape and Shape(**shape)) for part, shape in gang.gather_json((rank, own))])

    def check(self) -> None:
        """Raise UsageError if a data-parallel rank has no loader, or if ranks load different data."""
        if problems := [*_parts_without(self._by_rank), *_disagreements(self._by_rank)]:
            raise UsageError([f"build_{self._kind}_data_loader: {problem}" for problem in problems])

    @property
    def shortest(self) -> int | None:
        """The smallest known length; None if none is known."""
        return min((length for length in self.lengths if length is not None), default=None)

    def stand_in(self, rank: int) -> DataLoader | Iterable[Any]:
        """Return a stand-in for the loader of data-parallel rank `rank`, for a rank without a loader."""
        return next(shape for part, shape in self._by_rank if part == rank and shape).stand_in(self._kind)


def _parts_without(by_rank: list[tuple[int, Shape | None]]) -> Iterator[str]:
    if missing := sorted({part for part, _ in by_rank} - {part for part, shape in by_rank if shape}):
        parts = ", ".join(map(str, missing))
        where = f"with data-parallel rank {parts}" if any(shape for _, shape in by_rank) else "at all"
        yield f"it returned None, and no rank {where} loads data; return a loader on one rank of each"


def _disagreements(by_rank: list[tuple[int, Shape | None]]) -> Iterator[str]:
    loading = [(rank, shape) for rank, (_, shape) in enumerate(by_rank) if shape]
    for rank, shape in loading:
        first_rank, first = loading[0]
        if not shape.fits(first):
            yield (
                f"rank {first_rank} loads {first}, and rank {rank} {shape}; return a loader of the same data with "
                f"the same arguments on all ranks that load: each rank gets its share automatically"
            )
            return
