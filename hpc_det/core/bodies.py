"""The bodies of a user's loops, and what they ask for in the middle.

In the middle of a body the state belongs to no position from which a run could resume: behind a validation, for
example, a step of a learning rate schedule may still follow. So what a body asks for, such as a save, is done when it
ends. There are three kinds: the body of a batch; that of `epochs` or `search`; and, behind the end of `batches`, the
tail, which ends with the body around it or, without one, with the next pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The state at the beginning of a tail. A run that is stopped in the tail repeats it from there."""

    rng: dict[str, Any]
    validated: int
    """Number of batches at the last validation before the tail."""
    best: float | None
    """Best value of the searcher's metric before the tail."""


class Bodies:
    """The open bodies of one rank's loops."""

    def __init__(self) -> None:
        self.in_batch = False
        self.in_epoch = False
        self.in_operation = False
        self.uses_batches = False
        """Whether a pass was begun in this process. A loop without `batches` has no bodies, since it may call
        `should_stop` and `save` wherever its own state is that of a step."""
        self.has_pass = False
        """Whether the open body of `epochs` has made a pass."""
        self.tail: Tail | None = None
        self.asks = False
        """Whether something is to be done when the body has ended: a save, reports, or a report to the search."""
        self.wants_save = False
        self.after_save: list[Callable[[], None]] = []
        """Reports that are made once a save is committed."""

    @property
    def is_one_open(self) -> bool:
        """Whether the code that runs now is in the middle of a body."""
        in_operation = self.in_operation and self.uses_batches
        return self.in_batch or self.in_epoch or in_operation or self.tail is not None
