"""`qsub -v`: which values arrive, and in which form; every case here was recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.labs.pbs.resources import Refused

CANNOT_SEND = Refused(1, "cannot send environment with the job")


def parse_variables(text: str, env: Mapping[str, str]) -> dict[str, str]:
    """Split at commas, except in quotes or after a backslash; quotes are removed, other backslashes doubled."""
    if re.search(r"""'[^']*"[^']*,[^']*'""", text):
        raise CANNOT_SEND
    found: dict[str, str] = {}
    for part in _split(text):
        name, equals, value = part.partition("=")
        if not name or (not equals and name not in env):
            raise CANNOT_SEND
        found[name] = value.rstrip(" ") if equals else env[name]
    return found


def _split(text: str) -> list[str]:
    parts, quote, escaped = [""], "", False
    for letter in text:
        if escaped:
            parts[-1] += letter if letter == "," else "\\\\" + ("\\\\" if letter == "\\" else letter)
            escaped = False
        elif letter == "\\":
            escaped = True
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "," and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if quote:
        raise CANNOT_SEND
    return parts
