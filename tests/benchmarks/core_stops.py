"""Checks for a stop: `should_stop` of the Core API, beside a collective in each step, as Accelerate's trigger is.

Fabric has no such call.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

import hpc_det.core
from hpc_det.distributed.collectives import Distributed
from tests.benchmarks.loop_overhead import silence
from tests.distributed.ranks import run_on_ranks

CALLS, CALLS_OF_COLLECTIVES = 2000, 50
"""Calls of a round: few enough that a busy machine leaves some rounds undisturbed."""
OURS = "core.should_stop()"
DEADLINE_S = 600

Calls = Mapping[str, tuple[Callable[[], Any], int]]
"""The calls that are compared, with the number of them in a round."""


def on_one_rank(rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a call in each round."""
    with hpc_det.core.init(name="stops") as core:
        return in_turns({OURS: (core.should_stop, CALLS), **accelerates()}, rounds)


def on_two_ranks(rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a call of rank 0 in each round."""
    found: dict[str, list[float]] = run_on_ranks(2, _on_a_rank, rounds, deadline_s=DEADLINE_S)[0]
    return found


def _on_a_rank(distributed: Distributed, rounds: int) -> dict[str, list[float]]:
    os.environ.update(TORCHELASTIC_RUN_ID="bench", GROUP_RANK="0")  # as torchrun sets them
    flag = torch.zeros(1)
    with tempfile.TemporaryDirectory() as root, silence():
        os.environ["HPC_DET_ROOT"] = root
        with hpc_det.core.init(name="stops", distributed=distributed) as core:

            def all_reduced() -> bool:
                dist.all_reduce(flag)
                return bool(flag.item())

            collectives = {"an all-reduce of a flag over gloo": (all_reduced, CALLS_OF_COLLECTIVES)}
            taken = in_turns({OURS: (core.should_stop, CALLS), **collectives, **accelerates()}, rounds)
        distributed.barrier()  # the folder is rank 0's
    return taken


def accelerates() -> Calls:
    if not find_spec("accelerate"):
        return {}
    from accelerate import Accelerator

    return {"accelerator.check_trigger()": (Accelerator(cpu=True).check_trigger, CALLS_OF_COLLECTIVES)}


def in_turns(calls: Calls, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of each call in each round, without those of the loop."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, count) in calls.items():
            taken[name].append(microseconds(call, count))
    loop_us = min(_empty_loop_us() for _ in range(rounds))
    return {name: [value - loop_us for value in values] for name, values in taken.items()}


def microseconds(call: Callable[[], Any], count: int) -> float:
    """Return the microseconds of a call and of the loop around it."""
    began = perf_counter_ns()
    for _ in range(count):
        call()
    return (perf_counter_ns() - began) / count / 1000


def _empty_loop_us() -> float:
    began = perf_counter_ns()
    for _ in range(CALLS):
        pass
    return (perf_counter_ns() - began) / CALLS / 1000
