"""`qsub`: options and directives, the requests that it refuses, and the requests that it sends."""

from __future__ import annotations

import getopt
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.labs.pbs import client
from tests.labs.pbs.directives import directives
from tests.labs.pbs.environment import user, variables_of_login
from tests.labs.pbs.resources import Refused, parse_resources, resource_list
from tests.labs.pbs.site import LOGIN_HOST, SERVER, Site
from tests.labs.pbs.variables import parse_variables

USAGE = """usage: qsub [-a date_time] [-A account_string] [-c interval]
	[-C directive_prefix] [-e path] [-f ] [-h ] [-I [-X]] [-j oe|eo] [-J X-Y[:Z]]
	[-k keep] [-l resource_list] [-m mail_options] [-M user_list]
	[-N jobname] [-o path] [-p priority] [-P project] [-q queue] [-r y|n]
	[-R o|e|oe] [-S path] [-u user_list] [-W otherattributes=value...]
	[-v variable_list] [-V ] [-z] [script | -- command [arg1 ...]]
       qsub --version"""
OPTIONS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:W:v:VXz"
DEPENDENCIES = ("after", "afterok", "afternotok", "afterany")
Options = list[tuple[str, str]]


class BadUsage(Refused):
    """An error that is printed with the usage, as getopt's callers do."""


def qsub(site: Site, arguments: list[str]) -> int:
    try:
        return _submit(site, arguments)
    except BadUsage as wrong:
        for line in filter(None, wrong.text.splitlines()):
            print(f"qsub: {line}", file=sys.stderr)
        print(USAGE, file=sys.stderr)
        return wrong.code


def _submit(site: Site, arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print("pbs_version = 23.06.06")
        return 0
    options, rest, is_program = _read(arguments)
    if any(name == "-I" for name, _ in options) and not sys.stdin.isatty():
        print("qsub:\tstandard input and output must be a terminal for\n\tinteractive job submission", file=sys.stderr)
        raise Refused(1, "")
    script, path = (None, "") if is_program else _script(rest)
    if script is not None:
        options = _directives(script, options) + options
    job = _job(options, path, script, rest if is_program else None, arguments)
    answer = client.ask(site.server_socket, do="submit", job=job)
    if answer["code"]:
        raise Refused(answer["code"], answer["text"])
    if not any(name == "-z" for name, _ in options):
        print(answer["id"], flush=True)
    return _exit_code(site, answer["id"]) if _attributes(options).get("block") == "true" else 0


def _exit_code(site: Site, job_id: str) -> int:
    status: int | None = client.ask(site.server_socket, do="wait", id=job_id).get("exit")
    return 0 if status is None else status & 0xFF


def _read(arguments: list[str]) -> tuple[Options, list[str], bool]:
    """Return the options, the script or the program, and whether it is a program: `-- command`."""
    if arguments and arguments[0].startswith("--") and arguments[0] != "--":
        letters = "".join(f"invalid option -- '{letter}'\n" for letter in arguments[0][1:3])
        raise BadUsage(2, letters)
    try:
        options, rest = getopt.getopt(arguments, OPTIONS)
    except getopt.GetoptError as wrong:
        raise BadUsage(2, f"invalid option -- '{wrong.opt[:1]}'") from None
    used = arguments[: len(arguments) - len(rest)]
    is_program = bool(used) and used[-1] == "--"
    if not is_program and len(rest) > 1:
        raise BadUsage(2, "")
    return options, [word for word in rest if word], is_program


def _script(rest: list[str]) -> tuple[str, str]:
    if not rest or rest == ["-"]:
        return _copied(sys.stdin.read()), "STDIN"
    try:
        return _copied(Path(rest[0]).read_text()), rest[0]
    except OSError:
        raise Refused(1, "script file:: No such file or directory") from None


def _copied(script: str) -> str:
    """Write the script to a file in TMPDIR first, as qsub does."""
    folder = os.environ.get("PBS_TMPDIR") or os.environ.get("TMPDIR") or "/var/tmp"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="pbsscrpt", dir=folder) as file:
            file.write(script)
    except OSError as error:
        print(f"mkstemp: {error.strerror}", file=sys.stderr)
        raise Refused(1, f"could not create/open tmp file {folder}/pbsscrptXXXXXX for script") from None
    return script


def _directives(script: str, options: Options) -> Options:
    prefix = dict(options).get("-C", "#PBS")
    words = directives(script, prefix)
    try:
        found, rest = getopt.getopt(words, OPTIONS)
    except getopt.GetoptError as wrong:
        raise Refused(1, f"directive error: {wrong.msg}") from None
    if rest:
        raise Refused(1, f"directive error: {' '.join(rest)} ")
    return found


def _job(
    options: Options, path: str, script: str | None, argv: list[str] | None, arguments: list[str]
) -> dict[str, Any]:
    given = dict(options)
    attributes = _attributes(options)
    resources, chunks = resource_list(parse_resources([value for name, value in options if name == "-l"]))
    queue = _queue(given.get("-q", ""))
    first, last, step, limit = _array(given["-J"]) if "-J" in given else (0, 0, 0, None)
    workdir = os.environ.get("PWD", "") if _is_here(os.environ.get("PWD", "")) else os.getcwd()
    name = _name(given["-N"]) if "-N" in given else Path(argv[0] if argv else path).name
    return {
        "name": name,
        "queue": queue,
        "resources": resources,
        "chunks": [chunk.as_dict() for chunk in chunks],
        "variables": _variables(options, workdir, queue),
        "workdir": workdir,
        "owner": f"{user()}@{LOGIN_HOST}",
        "arguments": " ".join(word for word in arguments if word),
        "script": script,
        "argv": argv,
        "shell": given.get("-S"),
        "output": given.get("-o"),
        "error": given.get("-e"),
        "join": given.get("-j", "n"),
        "keep": given.get("-k", "n"),
        "rerunnable": _one_of(given, "-r", ("y", "n"), "y") == "y",
        "held": "-h" in given,
        "umask": int(attributes.get("umask", "077"), 8),
        "depend": parse_depend(attributes.get("depend", "")),
        "array": (first, last, step) if step else None,
        "max_run_subjobs": limit,
        "execution_time": parse_date(given["-a"]) if "-a" in given else None,
        "priority": parse_priority(given.get("-p", "0")),
        "account": given.get("-A"),
        "project": given.get("-P", "_pbs_project_default"),
    }


def _is_here(folder: str) -> bool:
    return bool(folder) and os.path.isdir(folder) and os.path.samefile(folder, os.getcwd())


def _attributes(options: Options) -> dict[str, str]:
    """Return all `-W name=value`."""
    found: dict[str, str] = {}
    for text in (value for name, value in options if name == "-W"):
        for setting in re.split(r",(?=\w+=)", text):
            name, equals, value = setting.partition("=")
            if not equals:
                raise BadUsage(2, "illegal -W value")
            found[name] = value
    if found.get("group_list", "nosuchgroup") == "nosuchgroup" and "group_list" in found:
        raise Refused(197, "Bad GID for job execution")
    return found


def _variables(options: Options, workdir: str, queue: str) -> dict[str, str]:
    env = dict(os.environ)
    variables = variables_of_login(env, workdir, queue)
    for name, text in options:
        if name == "-V":
            variables = env | variables
        elif name == "-v":
            variables |= parse_variables(text, env)
    return variables | {"PBS_O_QUEUE": queue, "PBS_O_HOST": LOGIN_HOST}


def _queue(destination: str) -> str:
    queue, _, server = destination.partition("@")
    if server not in ("", SERVER):
        print("Unknown Host.", file=sys.stderr)
        raise Refused(160, f"cannot connect to server {SERVER} (errno=15008)")
    return queue or "workq"


def _name(name: str) -> str:
    if len(name) > 236:
        raise Refused(2, "Job name is too long ")
    if not re.fullmatch(r"[A-Za-z0-9_.+\-]+", name):
        raise BadUsage(2, "illegal -N value")
    return name


def _array(text: str) -> tuple[int, int, int, int | None]:
    match = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?:%(\d+))?", text)
    if not match or int(match[1]) >= int(match[2]) or match[3] == "0":
        raise BadUsage(2, "illegal -J value")
    return int(match[1]), int(match[2]), int(match[3] or 1), int(match[4]) if match[4] else None


def _one_of(given: dict[str, str], name: str, values: tuple[str, ...], default: str) -> str:
    if (value := given.get(name, default)) not in values:
        raise BadUsage(2, f"illegal {name} value")
    return value


def parse_priority(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text) or not -1024 <= int(text) <= 1023:
        raise BadUsage(2, "illegal -p value")
    return int(text)


def parse_date(text: str) -> float:
    """Parse `[[CC]YY]MMDDhhmm[.SS]`, or `hhmm` of today or tomorrow."""
    digits, _, seconds = text.partition(".")
    now = time.localtime()
    full = time.strftime("%Y%m%d%H%M", now)[: 12 - len(digits)] + digits
    try:
        moment = time.mktime(time.strptime(full + (seconds or "00"), "%Y%m%d%H%M%S"))
    except ValueError:
        raise BadUsage(2, "illegal -a value") from None
    return moment + 86400 if len(digits) == 4 and moment < time.time() else moment


def parse_depend(text: str) -> list[tuple[str, list[str]]]:
    found = []
    for part in filter(None, text.split(",")):
        kind, *ids = part.split(":")
        if kind not in DEPENDENCIES or not ids:
            raise BadUsage(2, "illegal -W value")
        found.append((kind, [full_id(one) for one in ids]))
    return found


def full_id(text: str) -> str:
    """Return the full ID: `12` and `12.pbshead` are the same job."""
    return text if "." in text or not text[:1].isdecimal() else f"{text}.{SERVER}"
