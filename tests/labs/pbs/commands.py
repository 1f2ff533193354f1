"""The commands that send one request for each of their IDs: qdel, qsig, qhold, qrls, qrerun, qalter, qmove, qorder."""

from __future__ import annotations

import getopt
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.labs.pbs import client, qsub
from tests.labs.pbs.environment import user
from tests.labs.pbs.resources import Refused, parse_resources
from tests.labs.pbs.site import LOGIN_HOST, SERVER, Site

MANAGER = "PBS_LAB_MANAGER"
"""Environment variable that makes a command act as a manager of the site; without it no user does, not even root."""
MALFORMED = 1
Asked = dict[str, Any]

QALTER_USAGE = """usage: qalter [-a date_time] [-A account_string] [-c interval] [-e path]
	[-h hold_list] [-j y|n] [-k keep] [-l resource_list]
	[-m mail_options] [-M user_list] [-N jobname] [-o path] [-p priority]
	[-R o|e|oe] [-r y|n] [-S path] [-u user_list] [-W dependency_list]
	[-P project_name] job_identifier...
       qalter --version"""


def qdel(site: Site, arguments: list[str]) -> int:
    options, ids = getopt.gnu_getopt(arguments, "xW:")
    given = dict(options)
    asked = {"do": "delete", "force": given.get("-W") == "force", "history": "-x" in given}
    return _each("qdel", site, ids, asked | {"by": f"{user()}@{LOGIN_HOST}"})


def qsig(site: Site, arguments: list[str]) -> int:
    options, ids = getopt.gnu_getopt(arguments, "s:")
    return _each("qsig", site, ids, {"do": "signal", "signal": dict(options).get("-s", "SIGTERM")})


def qhold(site: Site, arguments: list[str]) -> int:
    return _each_hold("qhold", site, arguments, "hold")


def qrls(site: Site, arguments: list[str]) -> int:
    return _each_hold("qrls", site, arguments, "release")


def _each_hold(name: str, site: Site, arguments: list[str], do: str) -> int:
    options, ids = getopt.gnu_getopt(arguments, "h:")
    return _each(name, site, ids, {"do": do, "holds": dict(options).get("-h", "u")})


def qrerun(site: Site, arguments: list[str]) -> int:
    return _each("qrerun", site, getopt.gnu_getopt(arguments, "W:")[1], {"do": "rerun"})


def qmove(site: Site, arguments: list[str]) -> int:
    queue, *ids = arguments
    return _each("qmove", site, ids, {"do": "move", "queue": queue})


def qorder(site: Site, arguments: list[str]) -> int:
    return _each("qorder", site, arguments[:1], {"do": "order", "other": qsub.full_id(arguments[1])})


def qalter(site: Site, arguments: list[str]) -> int:
    try:
        options, ids = getopt.gnu_getopt(arguments, "a:A:e:h:j:k:l:m:M:N:o:p:P:R:r:S:u:W:")
        changes = _changes(options)
    except getopt.GetoptError as wrong:
        return _bad_qalter(f"invalid option -- '{wrong.opt}'")
    except qsub.BadUsage as wrong:
        return _bad_qalter(wrong.text)
    return _each("qalter", site, ids, {"do": "alter", "changes": changes})


def _bad_qalter(text: str) -> int:
    print(f"qalter: {text}\n{QALTER_USAGE}", file=sys.stderr)
    return 2


def _changes(options: list[tuple[str, str]]) -> Asked:
    """Return the changed fields of the job by name, and the resources as `asked`."""
    parsers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "-N": ("name", str),
        "-o": ("output", str),
        "-e": ("error", str),
        "-p": ("priority", qsub.parse_priority),
        "-a": ("execution_time", qsub.parse_date),
        "-r": ("rerunnable", lambda text: text == "y"),
        "-W": ("depend", _dependencies),
    }
    changes = {parsers[name][0]: parsers[name][1](value) for name, value in options if name in parsers}
    return changes | {"asked": parse_resources([value for name, value in options if name == "-l"])}


def _dependencies(text: str) -> list[tuple[str, list[str]]]:
    """Parse dependencies. An empty list is refused, so that an existing dependency cannot be removed."""
    if not (found := qsub.parse_depend(text.removeprefix("depend="))):
        raise qsub.BadUsage(2, "illegal -W value")
    return found


def _each(name: str, site: Site, ids: list[str], asked: Asked) -> int:
    """Send a request for every ID; return the exit code of the last error."""
    code = 0
    for text in ids:
        for job_id in _expanded(name, text):
            answer = client.ask(site.server_socket, id=job_id, manager=bool(os.environ.get(MANAGER)), **asked)
            if answer["code"]:
                code = answer["code"]
                print(f"{name}: {answer['text']}", file=sys.stderr)
    return code


def _expanded(name: str, text: str) -> Iterator[str]:
    """Yield the IDs of subjobs: `12[2-3]` is two."""
    match = re.fullmatch(r"(\d+)(\[([\d,:-]*)\])?(\.[\w.-]+)?", text)
    if not match:
        raise Refused(MALFORMED, f"illegally formed job identifier: {text}")
    for part in (match[3] or "").split(","):
        first, _, last = part.partition("-")
        indices = range(int(first), int(last or first) + 1) if first else [""]
        brackets = [f"[{index}]" for index in indices] if match[2] else [""]
        yield from (f"{match[1]}{bracket}.{SERVER}" for bracket in brackets)
