"""`pbs_lab`: what no PBS has. `pbs_lab node pbsn2 down|up`, `pbs_lab server down|up`, `pbs_lab strays`."""

from __future__ import annotations

import sys

from tests.lab.pbs import client
from tests.lab.pbs.resources import Refused
from tests.lab.pbs.site import Site


def pbs_lab(site: Site, arguments: list[str]) -> int:
    what, *rest = arguments
    if what == "strays":
        asked: dict[str, object] = {"do": what}
    elif what == "node":
        asked = {"do": what, "name": rest[0], "up": rest[1] == "up"}
    else:
        asked = {"do": what, "up": rest[0] == "up"}
    answer = client.ask(site.mom_socket, **asked)
    if answer["code"]:
        raise Refused(answer["code"], answer["text"])
    for pid, command in answer.get("strays", {}).items():
        print(pid, command, file=sys.stdout)
    return 0
