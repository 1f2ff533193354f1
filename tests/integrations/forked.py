"""A process that has imported a training script, and forks the ranks of each run: the imports take many seconds."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.wait import DEADLINE_S

PRELOAD = ("torch._dynamo", "deepspeed", "mlflow")
"""Modules that Accelerate imports if they are installed, in seconds."""
_CODE = "import sys; from tests.integrations.forked import serve; serve(sys.argv[1:])"


class ForkedRuns:
    """Starts the runs of some modules, each of which has a function `main(result, **options)`."""

    def __init__(self, *modules: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _CODE, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, module: str, root: Path, name: str, ranks: int = 1, **options: Any
    ) -> tuple[list[dict[str, Any]], list[int], str]:
        """Return the results of the ranks that wrote one, the exit codes, and the output of rank 0.

        `root`: $HPC_DET_ROOT of the run. `name`: of its results.
        """
        root.mkdir(exist_ok=True)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        request = {"module": module, "root": str(root), "name": name, "ranks": ranks, "port": store.port}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({**request, "options": options}) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        written = (root / f"{name}-{rank}.json" for rank in range(ranks))
        results = [json.loads(path.read_text()) for path in written if path.exists()]
        return results, codes, (root / f"{name}-0.log").read_text()

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(DEADLINE_S)
        assert self._server.stdout is not None
        self._server.stdout.close()


def serve(modules: list[str]) -> None:
    """Fork the ranks of each request that stdin brings, and write their exit codes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)  # a process with threads must not be forked
    for module in (*modules, *PRELOAD):
        with suppress(ModuleNotFoundError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections of the forks are fast then
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_fork(request, rank) for rank in range(request["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def _fork(request: Mapping[str, Any], rank: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        _enter(request, rank)
        module = importlib.import_module(request["module"])
        module.main(f"{request['root']}/{request['name']}", **request["options"])
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(request: Mapping[str, Any], rank: int) -> None:
    os.environ["HPC_DET_ROOT"] = request["root"]
    if request["ranks"] > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]), TORCHELASTIC_USE_AGENT_STORE="True"
        )
        os.environ.update(HPC_DET_SECRET="the secret of these ranks")
        size = str(request["ranks"])
        os.environ.update(RANK=str(rank), WORLD_SIZE=size, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=size)
    log = os.open(f"{request['root']}/{request['name']}-{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stdin = os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)  # that of the server has the next requests
