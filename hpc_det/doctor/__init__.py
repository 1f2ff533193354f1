"""What of all that hpc_det can use a site has, and a remedy for each thing it lacks: one subject a file.

Nothing is changed or submitted. Commands are asked all at once, each with a time limit, and what they answer may be
anything.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """One thing that was looked at."""

    subject: str
    verdict: Verdict
    message: str
    """What was found."""
    remedy: str = ""
    """What to do; empty only where all is well."""

    def as_json(self) -> dict[str, Any]:
        """`told` is the former name of the message."""
        return {**self._asdict(), "told": self.message}
