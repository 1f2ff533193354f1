"""Assertions about the facts in a message (paths, keys, values, numbers), whatever its wording."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

Error = TypeVar("Error", bound=BaseException)


@contextmanager
def refused(kind: type[Error], *facts: object) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Check that the block raises `kind`, and that its message names each of `facts`."""
    with pytest.raises(kind) as info:
        yield info
    missing = unnamed(str(info.value), *facts)
    assert not missing, f"{missing} not in the message: {str(info.value)[:2000]}"


def warned(kind: type[Warning], *facts: object) -> pytest.WarningsRecorder:
    """Check that the block issues a warning of `kind` whose message names each of `facts`."""
    return pytest.warns(kind, match=r"(?s)\A" + "".join(f"(?=.*{_whole(str(fact))})" for fact in facts))


def unnamed(message: str, *facts: object) -> list[str]:
    """Return those of `facts` that the message does not name; a word or number counts only as a whole."""
    return [str(fact) for fact in facts if re.search(_whole(str(fact)), message) is None]


def _whole(fact: str) -> str:
    before, after = (r"(?<!\w)" if fact[:1].isalnum() else "", r"(?!\w)" if fact[-1:].isalnum() else "")
    return before + re.escape(fact) + after


def keys(problems: Iterable[str]) -> list[str]:
    """Return the configuration path that each problem begins with, in order."""
    return [problem.partition(": ")[0] for problem in problems]


def each_names(messages: Iterable[str], *facts: Iterable[object]) -> None:
    """Check that there is one message for each of `facts`, in this order, and that it names them all."""
    found = list(messages)
    assert len(found) == len(facts), found
    assert [unnamed(message, *named) for message, named in zip(found, facts, strict=True)] == [[]] * len(found), found


def golden(module: str, name: str) -> list[str]:
    """Return the lines of the file `name` in the folder `golden` beside a test module, given by its `__file__`."""
    return Path(module).parent.joinpath("golden", name).read_text().splitlines()
