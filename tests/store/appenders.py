"""A process that appends to a shared log and prints the number of each entry that is in it.

    python -m tests.store.appenders FOLDER NAME COUNT [CHUNK]

It waits for a line on stdin, so that many processes can begin at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpc_det.store import shared_log


def main(folder: str, name: str, count: str, chunk: str) -> None:
    shared_log.CHUNK = int(chunk)
    log = shared_log.SharedLog(Path(folder))
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(count)):
        log.append({"by": name, "number": number})
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
