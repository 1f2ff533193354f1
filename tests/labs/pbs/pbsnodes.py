"""`pbsnodes`: print the nodes, in JSON or as text."""

from __future__ import annotations

import getopt
import sys
import time
from typing import Any

from tests.labs.pbs import client
from tests.labs.pbs.qstat import flat, print_json
from tests.labs.pbs.site import Site


def pbsnodes(site: Site, arguments: list[str]) -> int:
    options, names = getopt.gnu_getopt(arguments, "avlSjLF:oc:rH:")
    given = dict(options)
    nodes: dict[str, Any] = client.ask(site.server_socket, do="site")["nodes"]
    for name in names:
        if "-o" in given or "-r" in given:
            print(f"Error marking node {name} - Unauthorized Request ", file=sys.stderr)
            return 1
        if name not in nodes:
            print(f"Node: {name},  Error: Unknown node ", file=sys.stderr)
            return 1
    _print({name: nodes[name] for name in names or nodes}, given)
    return 0


def _print(nodes: dict[str, Any], given: dict[str, str]) -> None:
    if given.get("-F") == "json":
        print_json({"nodes": nodes})
    elif "-l" in given:
        for name, node in nodes.items():
            if "down" in node["state"]:
                print(f"{name:<20} {node['state']} {node['comment']}")
    else:
        for name, node in nodes.items():
            print("\n".join([name, *(f"     {key} = {value}" for key, value in flat(_as_text(node))), ""]))


def _as_text(node: dict[str, Any]) -> dict[str, Any]:
    texts = {name: time.strftime("%c", time.localtime(node[name])) for name in node if name.endswith("_time")}
    return node | texts | ({"jobs": ", ".join(node["jobs"])} if "jobs" in node else {})
