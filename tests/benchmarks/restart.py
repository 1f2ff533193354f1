"""Measure from the death of a rank to the next batch on the last rank, beside torchrun in a loop of the shell.

Each rank trains one batch with an all-reduce and notes the time; then rank 1 kills itself. The first restart counts as
well as the later ones. torchrun's own `--max-restarts` is no peer here: with torch 2.13 most restarted gangs of this
script hang, because gloo connects to the addresses of the former workers.

Where the Slurm of tests/labs can run, a row shows the same gang as a job on two of its nodes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.lab import run_experiment, running_lab
from tests.benchmarks.start import LIMITS
from tests.benchmarks.table import show
from tests.labs.slurm import available
from tests.launch.gang import Gang

RANKS = 4
RESTARTS = 6
RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(32, 10)
model(torch.randn(32, 32)).sum().backward()
dist.all_reduce(model.weight.grad)
rank, begun = os.environ["RANK"], time.monotonic()
with open(f"began-{rank}", "a") as file:
    file.write(f"{begun}\\n")
dist.barrier()
if len(open(f"began-{rank}").readlines()) > int(sys.argv[1]):
    os._exit(0)
if rank == "1":
    with open("killed", "a") as file:
        file.write(f"{time.monotonic()}\\n")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
ON_SLURM = """
name: restarts
entrypoint: python3 -m hpc_det.launch.direct train.py {restarts}
max_restarts: {restarts}
resources: {{slots_per_trial: {ranks}}}
searcher: {{name: single, metric: loss, max_length: {{batches: 1}}}}
"""


def main() -> None:
    rows = []
    for name, start in STARTS.items():
        if not (seconds := start()):
            continue
        rows.append((name, f"{seconds[0]:.2f}", f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}"))
    show(
        f"{RANKS} ranks, {RESTARTS} restarts: seconds from the kill of a rank to the next batch of the last rank",
        ("", "first", "min", "median"),
        rows,
    )


def _job(*, nursery: bool = True) -> list[float]:
    with _gang() as gang:
        words = [sys.executable, "-m", "hpc_det.launch.direct", "train.py", str(RESTARTS)]
        gang.plan(words, ranks_per_node=RANKS, max_restarts=RESTARTS, nursery=nursery)
        assert gang.start_job().wait() == 0, gang.trial.job_log.read_text()
        return _seconds(gang.code)


def _on_slurm() -> list[float]:
    """Return the same for a job on two nodes of the lab; an empty list if it cannot run."""
    if reason := available():
        print(f"a job on two nodes of Slurm: not measured: {reason}")
        return []
    with running_lab() as lab:
        config = ON_SLURM.format(ranks=RANKS, restarts=RESTARTS)
        return _seconds(Path(run_experiment(lab, config, "train.py", RANK).code))


def _torchrun() -> list[float]:
    with _gang() as gang:
        options = f"--standalone --nproc-per-node={RANKS} --max-restarts=0 --monitor-interval=0.1"
        once = f"{sys.executable} -m torch.distributed.run {options} train.py {RESTARTS}"
        loop = ["bash", "-c", f"until {once}; do :; done"]
        subprocess.run(loop, cwd=gang.code, env=os.environ | LIMITS, check=True, stderr=subprocess.DEVNULL)
        return _seconds(gang.code)


@contextmanager
def _gang() -> Iterator[Gang]:
    with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as tmp:
        gang = Gang(Path(state), Path(tmp))
        (gang.code / "train.py").write_text(RANK)
        yield gang


def _seconds(code: Path) -> list[float]:
    """Return the seconds from each kill to the next batch of the last rank; `code`: the folder of its script."""
    killed = _times(code / "killed")
    began = [_times(code / f"began-{rank}") for rank in range(RANKS)]
    return [max(each[number + 1] for each in began) - at for number, at in enumerate(killed)]


def _times(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()]


STARTS = {
    "a job": _job,
    "a job, launch.nursery: false": lambda: _job(nursery=False),
    "a job on two nodes of Slurm": _on_slurm,
    "torchrun, started again by `until`": _torchrun,
}


if __name__ == "__main__":
    main()
