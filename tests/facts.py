"""Assertions about what a message names (paths, keys, values, numbers), whatever its wording."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[BaseException], *facts: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises `kind`, and its message names each of `facts`."""
    with pytest.raises(kind) as info:
        yield info
    assert unnamed(str(info.value), *facts) == []


def unnamed(message: str, *facts: object) -> list[str]:
    """Return those of `facts` that the message does not name; a word or number counts only as a whole."""
    return [str(fact) for fact in facts if not _names(message, str(fact))]


def _names(message: str, fact: str) -> bool:
    before, after = (r"(?<!\w)" if fact[:1].isalnum() else "", r"(?!\w)" if fact[-1:].isalnum() else "")
    return re.search(before + re.escape(fact) + after, message) is not None


def keys(problems: Iterable[str]) -> list[str]:
    """Return the configuration path that each problem begins with, in order."""
    return [problem.partition(": ")[0] for problem in problems]
