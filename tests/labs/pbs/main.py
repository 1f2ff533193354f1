"""The entry point of every command of the site; a command's module is imported only when needed, for a fast start."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.labs.pbs.client import ServerDown
from tests.labs.pbs.resources import Refused
from tests.labs.pbs.site import SERVER, VERSION, Site

MODULES = {
    "qsub": "qsub",
    "qstat": "qstat",
    "qselect": "qstat",
    "qmgr": "qmgr",
    "pbsnodes": "pbsnodes",
    "pbsdsh": "tm",
    "pbs_tmrsh": "tm",
}

NO_SERVER = {
    "qstat": (255, f"qstat: cannot connect to server {SERVER} (errno=15010)"),
    "qdel": (162, f"Couldn't connect to cluster: {SERVER}"),
    "pbsnodes": (1, f"pbsnodes: cannot connect to server {SERVER}, error=15010"),
}


def main(name: str, home: str, arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"pbs_version = {VERSION}")
        return 0
    module = importlib.import_module(f"tests.labs.pbs.{MODULES.get(name, 'commands')}")
    try:
        code: int = getattr(module, name)(Site(Path(home)), arguments)
    except Refused as refusal:
        if refusal.text:
            print(f"{name}: {refusal.text}", file=sys.stderr)
        return refusal.code
    except ServerDown:
        code, text = NO_SERVER.get(name, (162, f"{name}: cannot connect to server {SERVER} (errno=15010)"))
        print(f"Connection refused\n{text}", file=sys.stderr)
    return code
