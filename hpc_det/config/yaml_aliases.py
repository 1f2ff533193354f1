"""A bound on what YAML's aliases repeat: ten lines of `[*a, *a, ...]` can stand for a billion values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml
from yaml.composer import ComposerError

from hpc_det.errors import UsageError

MOST_REPEATED = 100_000
"""Values that aliases may add to those that are written."""
_CHARS = 100
"""Of a text that count as one more value."""


class TooManyRepeated(ComposerError):
    """The document would be too large with each alias written out."""


def check_aliases(root: yaml.Node | None) -> None:
    """Raises TooManyRepeated with the line where it is."""
    if root is not None:
        _Sizes().expanded(root)


def refuse_bombs(files: Iterable[Path]) -> None:
    """Before another parser reads them, which finds other mistakes. Raises UsageError with file and line."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            if "&" in text and "*" in text:
                check_aliases(yaml.compose(text, Loader=yaml.SafeLoader))
        except TooManyRepeated as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise UsageError(f"{file}{line}: {error.problem}") from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue


class _Sizes:
    def __init__(self) -> None:
        self._expanded: dict[int, int] = {}
        """By id() of a node, with its aliases written out."""
        self._written = 0

    def expanded(self, node: yaml.Node) -> int:
        if id(node) in self._expanded:
            return self._expanded[id(node)]
        self._expanded[id(node)] = 0  # for a node that contains itself, which is an error of its own
        own = 1 + len(node.value) // _CHARS if isinstance(node, yaml.ScalarNode) else 1
        self._written += own
        size = own + sum(map(self.expanded, _children(node)))
        if size - self._written > MOST_REPEATED:
            raise TooManyRepeated(
                None,
                None,
                f"aliases (such as *name) repeat more than {MOST_REPEATED} values up to here; write out what is meant, "
                f"or keep the values in a file of their own that the trial reads",
                node.start_mark,
            )
        self._expanded[id(node)] = size
        return size


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return []
