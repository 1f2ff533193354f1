"""Run functions on real gloo ranks: forks of a process that has loaded torch, so that a gang starts at once."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_det.distributed.collectives import Distributed
from tests.wait import DEADLINE_S

PRELOAD = [
    "hpc_det.pytorch.deepspeed",
    "deepspeed.module_inject.auto_ep_layer",  # every engine imports this module
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported by ZeRO; loads torch's compiler, over 1 s
    "hpc_det.pytorch.loop.harness",
    "hpc_det.sgd.rank.runner",
    "hypothesis",
    "pytest",
    "torch._dynamo",  # DDP imports this one, which takes seconds
    "tests.distributed.frozen",
]

OnRanks = Callable[..., list[Any]]
"""on_ranks(size, function, *arguments, deadline_s=DEADLINE_S, on_a_gpu=False, nodes=1): the results of
`function(distributed, *arguments)` by rank.
"""


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[None]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it would end with this process


@pytest.fixture
def on_ranks(_fork_server: None) -> OnRanks:
    return run_on_ranks


def run_on_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    deadline_s: float = DEADLINE_S,
    on_a_gpu: bool = False,
    nodes: int = 1,
) -> list[Any]:
    """Return the results by rank. The first failure of a rank ends all ranks and fails the test with its traceback; at
    the deadline, the test fails with the stacks of the unfinished ranks.

    `on_a_gpu`: all ranks use the first GPU, each as if it were a node, over gloo, because NCCL refuses that. `nodes`:
    the ranks are numbered as on so many nodes with equally many ranks.
    """
    context = multiprocessing.get_context("forkserver")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    results: dict[int, Any] = {}
    stacks = Path(tempfile.mkdtemp())
    end = time.monotonic() + deadline_s
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_rank, args=(rank, size, nodes, server.port, theirs, stacks, on_a_gpu, function, arguments)
            )
            process.start()
            theirs.close()
            processes.append(process)
            lines[ours] = rank
        while len(results) < size:
            ready = wait([line for line, rank in lines.items() if rank not in results], end - time.monotonic())
            if not ready:
                late = sorted({*range(size)} - {*results})
                shown = "\n".join(f"rank {rank}:\n{_stacks(processes[rank], stacks / str(rank))}" for rank in late)
                pytest.fail(f"ranks {late} are not done after {deadline_s:.0f} s\n{shown}", pytrace=False)
            for line in ready:
                results[lines[line]] = _result(line, lines[line])  # type: ignore[arg-type, index]
        return [results[rank] for rank in range(size)]
    finally:
        for process in processes:
            if len(results) < size:
                process.kill()
            process.join()
        for line in lines:
            line.close()
        shutil.rmtree(stacks)


def _result(line: Connection, rank: int) -> Any:
    try:
        result, failure = pickle.loads(line.recv_bytes())
    except EOFError:
        pytest.fail(f"rank {rank} died without a result")
    if failure:
        pytest.fail(f"rank {rank}:\n{failure}", pytrace=False)
    return result


def _stacks(process: BaseProcess, shown: Path) -> str:
    """End the process and return the stacks that it wrote."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGABRT)  # faulthandler writes the stacks, see faulthandler.enable
    process.join(DEADLINE_S)
    return shown.read_text()


def _rank(
    rank: int,
    size: int,
    nodes: int,
    port: int,
    line: Connection,
    stacks: Path,
    on_a_gpu: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    faulthandler.enable((stacks / str(rank)).open("w"))
    torch.set_num_threads(1)
    torch.manual_seed(0)  # otherwise its state is that of the fork server, which depends on the imported modules
    if not on_a_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # As in a rank that a launcher started. With the start method of the fork server, workers would be its children.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(HPC_DET_SECRET="the secret of these ranks")
    local = size // nodes
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local))
    if on_a_gpu:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    distributed = Distributed.from_env(os.environ)
    try:
        if on_a_gpu:
            dist.init_process_group("cpu:gloo,cuda:gloo")
        distributed.start()
        result = function(distributed, *arguments)
        distributed.barrier()
        line.send_bytes(pickle.dumps((result, None)))  # send() would share tensors by descriptors
    except BaseException:
        line.send_bytes(pickle.dumps((None, traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # see hpc_det.distributed.rank_process.leave
