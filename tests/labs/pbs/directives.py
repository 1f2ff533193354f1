"""Parse the `#PBS` lines of a script, up to its first command."""

from __future__ import annotations

import shlex


def directives(script: str, prefix: str = "#PBS") -> list[str]:
    """Return the words of all directives."""
    words: list[str] = []
    for line in script.splitlines():
        text = line.strip()
        if text.startswith((f"{prefix} ", f"{prefix}\t")):
            words += shlex.split(text[len(prefix) :], comments=False)
        elif text and not text.startswith("#") and not text.startswith(":"):
            break
    return words
