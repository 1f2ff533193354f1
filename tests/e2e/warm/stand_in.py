"""In the place of a rank, for the launcher that has started it: ends as the rank that the server forks."""

from __future__ import annotations

import json
import os
import socket
import sys

SERVER = "HPC_DET_TEST_WARM_RANKS"
"""The variable that says where the server listens."""


def main(program: list[str]) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the one who prints to the log is the rank
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SERVER])
        wanted = {"program": program, "environment": {**os.environ}, "folder": os.getcwd()}
        server.sendall(json.dumps(wanted).encode() + b"\n")
        code = int(server.makefile().readline())
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
