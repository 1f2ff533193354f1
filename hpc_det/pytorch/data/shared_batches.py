"""One rank's share of the data that an hpc_det DataLoader loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from hpc_det.core.loader_workers import ClosableLoader
from hpc_det.core.progress import Position
from hpc_det.errors import UsageError, length_in_words
from hpc_det.pytorch.data.data_loader import DataLoader
from hpc_det.pytorch.data.micro_batches import Evaluation, Rounds, rounds_of
from hpc_det.pytorch.data.order import Items, Nominal, SameSize
from hpc_det.pytorch.data.partition import OnePass, SoMany, TrainingBatches


class SharedTraining:
    """The training data of one rank (see TrainingData)."""

    is_shared_out = True

    def __init__(
        self,
        loader: DataLoader,
        *,
        rank: int,
        size: int,
        seed: int,
        relies_on_length: bool = False,
        same_size: bool = False,
    ) -> None:
        """`relies_on_length`: other ranks load nothing and rely on the loader's len(), so each epoch must have it."""
        self._loader = loader
        self._rank = rank
        self._seed = seed
        self._items = _items(loader, seed, relies_on_length=relies_on_length, same_size=same_size)
        share = loader.share(self._items, size)
        share.check(self._items.nominal_length)
        self._share = share.of_same_size() if same_size else share
        self._torch_loader: ClosableLoader | None = None
        self.batches_per_epoch: int | None = self._share.batches_per_epoch(self._items.nominal_length)
        self.loads_in_workers = loader.num_workers > 0

    def whole_batches(self, position: Position) -> int:
        return self._share.whole_batches(position)

    def after(self, position: Position, batches: int = 1) -> Position:
        return self._share.after(position) if batches == 1 else self._share.after_whole(position, batches)

    def batches(self, position: Position) -> Iterator[Any]:
        """Return the batches from `position` on. Raises UsageError for a position beyond the end of the epoch."""
        length = self._items.length(position.epoch)
        if position.done >= length:
            raise UsageError(
                f"build_training_data_loader: epoch {position.epoch} has "
                f"{length_in_words(length, self._items.name)}, but the checkpoint has trained "
                f"{position.done}; resume with the data that it was trained on"
            )
        self.close()
        batches = TrainingBatches(self._share, rank=self._rank, position=position)
        self._torch_loader = self._loader.torch_loader(batches, "training", self._seed, self._rank)
        return iter(self._torch_loader)

    def close(self) -> None:
        if self._torch_loader is not None:
            self._torch_loader.close()


class SharedValidation:
    """The validation data of one rank (see ValidationData)."""

    def __init__(
        self,
        loader: DataLoader,
        *,
        rank: int,
        size: int,
        seed: int,
        evaluation: Evaluation = Evaluation.APART,
        per_batch: int = 1,
    ) -> None:
        together, pipelined = evaluation is not Evaluation.APART, evaluation is Evaluation.PIPELINED
        items = _items(loader, seed, relies_on_length=together, same_size=pipelined)
        if not items.nominal_length:
            raise UsageError(f"build_validation_data_loader: there are no {items.name}; validation needs at least one")
        cut = partial(OnePass, items, per_slot=loader.batch_size)
        shares = [cut(rank=part, size=size, drop_last=pipelined) for part in range(size)]
        own, whole = shares[rank], cut(rank=0, size=1)
        self._rounds = rounds = rounds_of(evaluation, len(own), [len(share) for share in shares], per_batch)
        self.length: int | None = len(own) if rounds.number is None else rounds.number
        self.left_out = _left_out(items, loader.batch_size, size, rounds) if pipelined else ""
        """The items that are not evaluated, as text; empty if all are."""
        # A rank with fewer batches than rounds repeats some, whose results do not count: all must evaluate together.
        batches = SoMany(own, whole, rounds.taken) if together else own
        self._share = loader.torch_loader(batches, "validation", seed)
        self._whole = loader.torch_loader(whole, "validation", seed)
        self.loads_in_workers = loader.num_workers > 0

    def batches(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._share)
        return iterator

    def rounds(self, batches: Iterator[Any] | None) -> Iterator[tuple[Any, bool]]:
        return self._rounds.of(batches)

    def whole(self) -> Iterable[Any]:
        return self._whole

    def close(self) -> None:
        self._share.close()
        self._whole.close()


def _items(loader: DataLoader, seed: int, *, relies_on_length: bool, same_size: bool) -> Items:
    items = loader.items(seed)
    if relies_on_length:
        items = Nominal(items)
    return SameSize(items) if same_size and loader.batch_sampler is not None else items


def _left_out(items: Items, per_slot: int, size: int, rounds: Rounds) -> str:
    """Return the items that a pipeline does not evaluate, as text."""
    left = items.nominal_length - rounds.taken * per_slot * size
    if not left:
        return ""
    return (
        f"{left} of {length_in_words(items.nominal_length, items.name)}: an evaluation of the pipeline takes "
        f"{rounds.per_round} whole micro batches of {per_slot} on each of {size} data-parallel ranks"
    )
