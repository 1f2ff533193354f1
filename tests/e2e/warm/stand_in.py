"""A stand-in for a rank, for the launcher that starts it: exits as the rank that the server forks does."""

from __future__ import annotations

import json
import os
import socket
import sys

SERVER = "HPC_DET_TEST_WARM_RANKS"
"""The environment variable with the path of the server's socket."""


def main(program: list[str]) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rank alone prints to the log
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
