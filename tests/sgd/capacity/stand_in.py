"""A stand-in for the node agent: it records its start and every stop signal until its driver disconnects.

    python -m tests.sgd.capacity.stand_in RUN_FOLDER SLOTS

The file RUN/hung-up means that the driver has disconnected.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from hpc_det.node.json_files import append_line
from hpc_det.node.process import STOP_SIGNALS, SignalPipe


def main(run: Path, slots: str) -> None:
    warnings = SignalPipe(STOP_SIGNALS)
    note = {"host": socket.gethostname(), "slots": int(slots), "pid": os.getpid(), "cpus": len(os.sched_getaffinity(0))}
    print("here", flush=True)
    append_line(run / "agents" / f"{socket.gethostname()}-{os.getpid()}.jsonl", note, durable=False)
    while not (run / "hung-up").exists():
        for number in warnings.received():
            append_line(run / "agents" / f"{socket.gethostname()}-{os.getpid()}.jsonl", {"leaving": number.name})
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
