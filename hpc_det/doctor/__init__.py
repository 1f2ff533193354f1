"""`hpc-det doctor`: checks of a site for everything that hpc_det uses, with a remedy for each problem.

Each subject has a module. Nothing is changed or submitted. Commands run in parallel, each with a time limit, and
unexpected output becomes a finding.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal["ok", "note", "problem"]
"""problem: something that hpc_det needs is missing or wrong. note: information, or an optional feature is missing."""


class Finding(NamedTuple):
    """The result of one check."""

    subject: str
    """The heading under which the finding is shown, such as "Slurm" or "profile atlas"."""
    verdict: Verdict
    message: str
    remedy: str = ""
    """Advice for the user; empty only if the verdict is ok."""

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON map."""
        # `told` is the key of the message in earlier versions
        return {**self._asdict(), "told": self.message}
