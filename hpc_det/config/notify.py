"""Hooks: who is told of a change of an experiment's state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field

from hpc_det.config.fields import Expected, OptionalText
from hpc_det.config.merge import Tree
from hpc_det.config.section import Section
from hpc_det.errors import Problem

WAYS = ("command", "webhook", "mail")
_State: TypeAlias = Literal["RUNNING", "PAUSED", "COMPLETED", "ERROR", "CANCELED"]
_Command = Annotated[
    list[str], Field(min_length=1), Expected("a list of words, such as [./tell.sh, --loud]; for a shell, [sh, -c, ...]")
]
# An address as browsers take it (HTML, 4.10.5.1.5), or the name of a user of this machine; no list, no other header.
_NAME = r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+"
_Mail = Annotated[
    str,
    Field(pattern=rf"^{_NAME}(@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*)?$"),
    Expected("one address, such as ada@example.org"),
]


class Hook(Section):
    """One of command, webhook and mail."""

    command: _Command | None = Field(
        default=None,
        description="A program that is run in the folder of the experiment's code, with the news on standard input.",
    )
    webhook: OptionalText = Field(
        default=None, description="An address that gets the news by POST; hidden wherever the config is shown."
    )
    mail: _Mail | None = Field(default=None, description="Who gets a mail, by the sendmail of the machine.")
    states: Annotated[
        list[_State], Field(min_length=1), Expected("a list of RUNNING, PAUSED, COMPLETED, ERROR and CANCELED")
    ] = Field(default=["COMPLETED", "ERROR", "CANCELED"], description="The news that this hook wants.")


def hook_problems(experiment: Tree) -> Iterator[Problem]:
    """What the schema leaves open. The address of a webhook is a secret, and no message shows it."""
    hooks = experiment.get("notify")
    for i, hook in enumerate(hooks if isinstance(hooks, list) else ()):
        if not isinstance(hook, dict):
            continue
        ways = [way for way in WAYS if hook.get(way) is not None]
        if len(ways) != 1:
            what = f"{' and '.join(ways)} are given together" if ways else "nobody is named"
            yield Problem(f"notify[{i}]", what, f"give one of {', '.join(WAYS)}; a list may have several hooks")
        if wrong := _not_an_address(hook.get("webhook")):
            yield Problem(f"notify[{i}].webhook", wrong, "give an address such as https://hooks.example.org/a/b")


def _not_an_address(url: Any) -> str | None:
    if not isinstance(url, str) or not url.strip():  # the schema's to say
        return None
    if not re.fullmatch(r"[!-~]+", url):
        return "holds blanks or characters that an address has to escape"
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError:
        return "has a host or a port that is none"
    if parts.scheme not in ("http", "https"):
        return "is no address of http or https"
    if not host:
        return "names no host"
    return "holds a name or password before its host, which is not supported" if "@" in parts.netloc else None
