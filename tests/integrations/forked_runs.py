"""Runs of a training under torchrun's variables, in forks of a process that has loaded its libraries once.

    python -m tests.integrations.forked_runs MODULE FOLDER < cells.json

`MODULE.train(options)` is one attempt of a training, and returns its result. Each cell is trained without a stop, and
stopped after each batch of its `stops` and resumed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from tests.wait import DEADLINE_S

Cell = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The results of one cell, by rank."""

    whole: list[Any]
    stopped: list[list[Any]]
    """Those of the attempts that were stopped."""
    resumed: list[Any]
    root: Path
    """HPC_DET_ROOT of the stopped and resumed run."""


def results_of(module: str, folder: Path, cells: dict[str, Cell]) -> dict[str, Results]:
    """Return the results of the cells by name. `ranks`: number of ranks of a cell, 1 by default; `stops`: batches."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.forked_runs", module, str(folder)],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return {name: _results(folder / name, len(cell["stops"])) for name, cell in cells.items()}


def _results(folder: Path, stops: int) -> Results:
    whole, *stopped, resumed = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("whole", *map(str, range(stops)), "resumed")
    )
    return Results(whole=whole, stopped=stopped, resumed=resumed, root=folder / "resumed")


# --- in the process that is forked


def main(module: str, folder: Path) -> None:
    train = importlib.import_module(module).train
    torch.set_num_threads(1)
    for name, cell in json.loads(sys.stdin.read()).items():
        stops = cell["stops"]
        here = folder / name
        _run(train, cell, here / "whole", here / "whole.json")
        for number, stop in enumerate(stops):
            _run(train, {**cell, "stop_at": stop}, here / "resumed", here / f"{number}.json")
        _run(train, cell, here / "resumed", here / "resumed.json")


def _run(train: Any, options: Cell, root: Path, result: Path) -> None:
    """Write the results of all ranks. Exits if a rank fails."""
    root.mkdir(parents=True, exist_ok=True)
    size = options.get("ranks", 1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if size > 1 else None
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            environment = {"HPC_DET_ROOT": str(root), "HPC_DET_SECRET": "the secret of these ranks"}
            if server:
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
                environment |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            _rank(train, options, environment, result.with_suffix(f".{rank}"))
        ranks.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in ranks]
    if any(codes):
        sys.exit(f"{result}: a rank failed")
    result.write_text(f"[{','.join(result.with_suffix(f'.{rank}').read_text() for rank in range(size))}]")


def _rank(train: Any, options: Cell, environment: dict[str, str], result: Path) -> NoReturn:
    os.environ.update(environment)
    code = 1
    try:
        result.write_text(json.dumps(train(options)))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
