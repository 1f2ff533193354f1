"""Texts and numbers, which the schema leaves free. Read from plain trees, beside what the schema tells."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

from hpc_det.config.merge import Tree, join
from hpc_det.errors import Problem, shown

# Control characters, line separators, and surrogates, which no file can hold as UTF-8. A newline in submitit's job name
# runs as shell code.
_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
_LARGEST = 2**63
"""No scheduler, and no reader of JSON but Python's, takes more."""
FREE_FORM = ("data", "hyperparameters")


def text_problems(tree: Any, path: str = "") -> Iterator[Problem]:
    """Control characters in any key or value, keys that are not texts, and numbers that are too large."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                yield Problem(join(path, key), f"the key {key!r} is not a text", "put it in quotes")
            else:
                yield from _control_characters(key, join(path, key), "")
            yield from text_problems(value, join(path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from text_problems(value, f"{path}[{i}]")
    elif type(tree) is int and abs(tree) >= _LARGEST and path.split(".")[0] not in FREE_FORM:
        yield Problem(path, f"{shown(tree)} has more than 63 bits", "give a smaller number")
    elif isinstance(tree, str):
        # Free-form values reach the trial as JSON, never a shell: a text of several lines or a tab is data there.
        yield from _control_characters(tree, path, "\n\t" if path.split(".")[0] in FREE_FORM else "")


def _control_characters(text: str, path: str, allowed: str) -> Iterator[Problem]:
    found = {char for char in text if unicodedata.category(char) in _REFUSED_CATEGORIES and char not in allowed}
    if found:
        names = ", ".join(f"U+{ord(char):04X}" for char in sorted(found))
        yield Problem(path, f"control character {names} in {shown(text)}", "remove it")


def searcher_name(tree: Tree) -> str | None:
    """What a tree that may be wrong anywhere calls its searcher."""
    searcher = tree.get("searcher")
    name = searcher.get("name") if isinstance(searcher, dict) else None
    return name if isinstance(name, str) else None
