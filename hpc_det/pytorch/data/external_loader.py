"""External loaders of a trial: loaders other than hpc_det's, which shard, shuffle and skip themselves.

They are used unchanged, and must also find their position after a resume themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, ClassVar

from hpc_det.core.external_loader import ExternalLoader, length_of
from hpc_det.core.progress import Position
from hpc_det.errors import UsageError
from hpc_det.pytorch.data.micro_batches import Rounds


class _OfTrial(ExternalLoader):
    """An external loader of a trial."""

    kind: ClassVar[str]
    """ "training" or "validation"."""

    def _endless(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return the iterator's batches, then those of further iterations of the loader, endlessly."""
        return chain.from_iterable(self._passes(iterator))  # one call of Python less per batch than a generator

    def _passes(self, iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
        again = ""
        while True:
            first = [*islice(iterator, 1)]
            if not first:
                raise self._problem(
                    f"gives no batch{again}; return a loader that can be iterated repeatedly, or that never ends"
                )
            yield iter([first.pop()])  # `first` must not keep the batch's memory
            yield iterator
            iterator = self._begin()
            again = " when it is iterated again"

    def _problem(self, what: str) -> UsageError:
        return UsageError(f"build_{self.kind}_data_loader: the {type(self._loader).__name__} {what}")


class ExternalTraining(_OfTrial):
    """Training data from an external loader (see TrainingData). A position counts batches."""

    kind = "training"
    is_shared_out = False

    def __init__(self, loader: Iterable[Any], batches_per_epoch: int | None) -> None:
        super().__init__(loader)
        self.batches_per_epoch = batches_per_epoch
        if batches_per_epoch == 0:
            raise self._problem("has no batches; training needs at least one")

    def whole_batches(self, position: Position) -> int:
        """Return the batches left in the epoch; sys.maxsize without a length, because the epoch never ends."""
        return sys.maxsize if self.batches_per_epoch is None else self.batches_per_epoch - position.done

    def after(self, position: Position, batches: int = 1) -> Position:
        done = position.done + batches
        if self.batches_per_epoch is not None and done >= self.batches_per_epoch:
            return Position(position.epoch + 1)
        return Position(position.epoch, done)

    def batches(self, position: Position) -> Iterator[Any]:
        """Return the batches from the loader's beginning: it must find `position` itself."""
        # The iterator is made now, not at the first batch, because making it may draw random numbers.
        return self._endless(self._begin())


class ExternalValidation(_OfTrial):
    """Validation data from an external loader: each rank evaluates its whole loader (see ValidationData)."""

    kind = "validation"

    def __init__(self, loader: Iterable[Any], rounds: Rounds, size: int) -> None:
        """`size`: number of ranks.

        Raises UsageError for an iterator without a length, and for an empty loader on the only rank, or if all evaluate
        together. An empty loader on one of several ranks is allowed if each evaluates alone.
        """
        super().__init__(loader)
        self._rounds = rounds
        self._together = rounds.number is not None
        own = length_of(loader)
        is_iterator = isinstance(loader, Iterator)
        if is_iterator and own is None:
            raise self._problem(
                "is an iterator without a length: it may never end, and the next validation cannot begin it again; "
                "return a loader, or give it a __len__, the number of batches of a validation"
            )
        # A torch loader ends by itself, possibly later than its data set says.
        self._limit = own if self._torch_loader is None else None
        self.is_cut = is_iterator
        """Whether the loader may never end, so that a validation takes as many batches as its length says."""
        self.length = rounds.number if self._together else own
        if own == 0 and (size == 1 or self._together):
            raise self._problem("has no batches; validation needs at least one")

    def batches(self) -> Iterator[Any]:
        batches = self._begin()
        return islice(self._endless(batches), self._rounds.taken) if self._together else islice(batches, self._limit)

    def rounds(self, batches: Iterator[Any] | None) -> Iterator[tuple[Any, bool]]:
        return self._rounds.of(batches)

    def whole(self) -> Iterable[Any]:
        return self._loader if self._limit is None else _First(self._loader, self._limit)


class _First:
    """The first batches of a loader, with the loader's other attributes."""

    def __init__(self, loader: Iterable[Any], number: int) -> None:
        self._loader = loader
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._number)

    def __len__(self) -> int:
        return self._number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
