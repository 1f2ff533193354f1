"""Limit the number of interpolations that a configuration resolves.

Sixty lines of `"${above}${above}"` expand to 2^60 characters, and OmegaConf takes as many steps to resolve them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError

MOST_REPEATED = 5_000
"""Resolved interpolations beyond those that are written."""
_CHARS = 1000
"""So many characters of a resolved text count as one more interpolation."""
_only_one = Lock()
"""Threads that compose would put each other's counters in the class."""


class TooManyRepeated(InterpolationResolutionError):
    """OmegaConf adds the key at which it is."""


@contextmanager
def bounded(written: int) -> Iterator[None]:
    """Within, OmegaConf raises TooManyRepeated instead of a very large tree. `written`: interpolations in the files.

    All ways in which OmegaConf resolves one, also nested ones and those of resolvers, go through resolve_parse_tree.
    """
    left = written + MOST_REPEATED

    def counted(self: Container, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        _check(left)
        resolved = resolve(self, *args, **kwargs)
        left -= len(resolved) // _CHARS if isinstance(resolved, str) else 0
        _check(left)
        return resolved

    with _only_one:
        resolve = Container.resolve_parse_tree
        Container.resolve_parse_tree = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _check(left: int) -> None:
    if left < 0:
        raise TooManyRepeated(
            f"interpolations (such as ${{name}}) repeat more than {MOST_REPEATED} values up to here; write the "
            f"values out, or move them to a file that the trial reads"
        )
