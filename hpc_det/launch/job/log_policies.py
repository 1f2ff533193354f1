"""The experiment's log policies: what the logs of a failed attempt say about its cause (Determined's log_policies)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.launch.log_tail import LONGEST_LINE

Policies = Sequence[Mapping[str, Any]]
"""As the effective configuration has them: name, pattern, action."""


class Match(NamedTuple):
    policy: str
    """Its name, or the pattern of one without a name."""
    line: str
    """Its beginning, where it is long: the journal keeps it."""
    action: str
    """cancel_retries or exclude_node."""
    log: Path
    """Where it was found."""


def matches(policies: Policies, logs: Mapping[Path, int]) -> list[Match]:
    """The first line that each policy matches in these files, each read from this many bytes on."""
    open_ones = [(policy, re.compile(policy["pattern"])) for policy in policies if policy["pattern"]]
    found = []
    for log, line in _lines(logs):
        for policy, pattern in [(policy, pattern) for policy, pattern in open_ones if pattern.search(line)]:
            name = policy["name"] or policy["pattern"]
            found.append(Match(name, line.strip()[:LONGEST_LINE], policy["action"], log))
            open_ones.remove((policy, pattern))
    return found


def _lines(logs: Mapping[Path, int]) -> Iterator[tuple[Path, str]]:
    for log, begin in logs.items():
        with log.open("rb") as file:
            file.seek(begin)
            for line in file:
                yield log, line.decode(errors="replace")
