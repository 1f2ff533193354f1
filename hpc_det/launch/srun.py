"""srun starts the ranks, in one step over the gang's nodes that runs beside the agents' step.

    python3 -m hpc_det.launch.srun [[SRUN_OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)

For sites that rely on srun to bind CPUs and devices to ranks. Overrides come after the flags set here and so take
precedence.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from hpc_det.errors import UsageError
from hpc_det.launch.launchers.arguments import Launch, start
from hpc_det.launch.launchers.nodes import run_gang
from hpc_det.launch.launchers.rank import as_rank
from hpc_det.node.environment_archive import on_any_node
from hpc_det.node.process import block_stop_signals
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Attempt


def step_flags(plan: JobPlan, env: Mapping[str, str]) -> list[str]:
    """Return the flags of the step, see srun(1)."""
    nodes = env.get("SLURM_STEP_NODELIST")
    return [
        "--overlap",  # the agents' step has the job's CPUs and devices, and shares them with this one
        f"--nodes={plan.nodes}",
        f"--ntasks={plan.world_size}",
        f"--ntasks-per-node={plan.ranks_per_node}",
        f"--cpus-per-task={plan.cpus_per_rank}",
        *([f"--nodelist={nodes}"] if nodes else []),  # the agents' nodes, which may be a part of the job's
        "--distribution=block",  # numbers the ranks node by node, as the plan does
        "--kill-on-bad-exit=1",  # by default srun leaves the other ranks running
        "--export=ALL",
    ]


def step_command(srun: Sequence[str], plan: JobPlan, overrides: Sequence[str]) -> list[str]:
    """Return the command line up to the rank's own command. Raises UsageError if srun is not on the PATH."""
    if shutil.which(srun[0]) is None:
        raise UsageError(f"{srun[0]}: command not found on this node; this launcher needs Slurm")
    rank = [*on_any_node(sys.executable), "-m", "hpc_det.launch.launchers.rank", "srun"]
    return [*srun, *step_flags(plan, os.environ), *overrides, *rank]


def _begin(launch: Launch, attempt: Attempt) -> int:
    os.environ.update(attempt.store_of_ranks())
    plan = JobPlan.of(attempt.trial.experiment())
    return run_gang(attempt, lambda: [*step_command(["srun"], plan, launch.overrides), *as_rank(launch.command)])


def main(argv: list[str]) -> int:
    block_stop_signals()
    return start("srun", argv, _begin, about=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
