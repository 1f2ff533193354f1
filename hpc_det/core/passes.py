"""The passes of a loop over its training data: begun, continued, and resumed in the middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpc_det.core.loader import ReplayedLoader
from hpc_det.distributed.rng import restore_rng, rng_state


class Passes:
    """The passes of one rank over its loader."""

    def __init__(self, of_rank: Mapping[str, Any], *, done: int, seed: int) -> None:
        """`of_rank`: this rank's state in the resumed checkpoint, with `done` batches of the open pass; {} without.
        A rank that is new in the gang has rank 0's, without `rng`.

        `seed` determines the random numbers that the loader's workers draw.
        """
        self._resumed = of_rank
        self._rng: dict[str, Any] | None = of_rank.get("rng")
        """The state of the random generators that is still to be restored; None if there is none."""
        self._seed = seed
        self._loader: ReplayedLoader | None = None
        self._source: Iterable[Any] | None = None
        """The user's loader behind `_loader`."""
        self._batches: Iterator[Any] | None = None
        """The open pass; None at its border."""
        self.done = done
        """Number of batches of the open pass that are done."""

    @property
    def reads_ahead(self) -> bool:
        """Whether the loader of the open pass reads a batch before it is asked for."""
        return self._loader is not None and self._loader.reads_ahead

    @property
    def rng(self) -> dict[str, Any]:
        """The state of the random generators for a checkpoint: the resumed one as long as it is not restored."""
        return rng_state() if self._rng is None else self._rng

    def open(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Return the rest of pass `epoch` over `source`; the open pass, if it is not at its end."""
        if self._batches is not None and source is self._source:
            return self._batches
        loader, resumed = self._loader_of(source), self._resumed.get("pass") or {}
        if self.done and self._resumed:
            self._batches = loader.resume(epoch, self.done, resumed or None, self._rng)
            self._rng = None
        else:
            self.restore_generators()
            loader.restore_generators(resumed.get("now", ()))
            self.done = 0
            self._batches = loader.begin(epoch)
        self._resumed = {}
        return self._batches

    def end(self) -> None:
        """End the open pass, so that the next `open` begins another one."""
        self._batches, self.done = None, 0

    def restore_generators(self) -> None:
        """Set the random generators to their state in the resumed checkpoint, unless this was done before."""
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def state(self) -> dict[str, Any]:
        """Return what `open` needs to continue; {} before the first pass."""
        if self._loader is None:
            return dict(self._resumed.get("pass") or {})
        return self._loader.began() if self._batches is not None else {"now": self._loader.generator_states()}

    def close(self) -> None:
        """End the loader's worker processes."""
        self.end()
        if self._loader:
            self._loader.close()
            self._loader = self._source = None

    def _loader_of(self, source: Iterable[Any]) -> ReplayedLoader:
        if self._loader is None or source is not self._source:
            if self._loader:
                self._loader.close()
            self._loader, self._source = ReplayedLoader(source, seed=self._seed), source
        return self._loader
