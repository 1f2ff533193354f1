"""A trial's folder with a handwritten plan; its job and agents run as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import write_json
from hpc_det.node.process import descendants
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.search.journal import SearchJournal
from hpc_det.search.state import SearchState
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.submit.render import render
from tests.plan.plans import job_plan
from tests.processes import modules
from tests.wait import DEADLINE_S, wait_for

# A rank without torch: it says hello, waits for a stop, saves and reports its exit. It exits when its agent is gone.
RANK = """
import os, sys
from pathlib import Path
from hpc_det.store.attempt import Attempt
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.lines import connect_local

rank, attempt = int(sys.argv[1]), Attempt.from_env(os.environ)
line = connect_local(attempt.socket)
say_hello(line, rank, os.getpid())
Path(f"rank-{rank}.part").write_text(str(os.getpid()))
os.replace(f"rank-{rank}.part", f"rank-{rank}.up")
deaf = "deaf" in sys.argv
while (message := line.receive()) is not None:
    if "stop" in message.head and not deaf:
        Path(f"rank-{rank}.saved").write_text(message.head["stop"])
        report_exit(line, 0)
        sys.exit(0)
Path(f"rank-{rank}.orphaned").touch()
sys.exit(1)
"""

EFFECTIVE: dict[str, Any] = {
    "name": "test",
    "searcher": {"name": "single", "metric": "loss", "smaller_is_better": True, "max_length": {"batches": 100}},
    "hyperparameters": {"lr": 0.1},
    "checkpoint_storage": {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1},
    "reproducibility": {"experiment_seed": 7},
}


def is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers(job: int) -> list[int]:
    """Return the process ids of a job's workers, without that of the job's guardian."""
    return [pid for pid in children(job) if "hpc_det.launch.job.worker" in modules(pid)]


class Gang:
    def __init__(self, folder: Path, tmp: Path) -> None:
        self.experiment = ExperimentFolder(folder / "experiments" / "12")
        self.trial: TrialFolder = self.experiment.trial()
        self.code = self.experiment.code
        self.env = {"TMPDIR": str(tmp)}
        """Variables for the job and the agents, in addition to the environment of the test."""
        self.printed = folder / "printed"
        """Output of the job, and of agents without a job. A file: a pipe stays open as long as any process holds it."""
        self._processes: list[subprocess.Popen[bytes]] = []
        for needed in (
            self.trial.logs,
            self.trial.checkpoints,
            self.code,
            self.experiment.search,
            self.experiment.jobs,
        ):
            needed.mkdir(parents=True)
        write_json(self.experiment.effective, EFFECTIVE)
        self.printed.touch()
        (self.code / "rank.py").write_text(RANK)

    @property
    def journal(self) -> Journal:
        return Journal(self.trial.journal)

    def search_for(self, **searcher: Any) -> None:
        """Write a configuration with this searcher instead of a single trial."""
        defaults: dict[str, Any] = {"divisor": 4, "bracket_rungs": [], "stop_once": False}
        write_json(
            self.experiment.effective, {**EFFECTIVE, "searcher": {**EFFECTIVE["searcher"], **defaults, **searcher}}
        )

    def search(self) -> SearchState:
        """Return the state that the journal gives to all workers."""
        return SearchJournal(self.experiment).state()

    def plan(self, entrypoint: str | Sequence[str], **changes: Any) -> JobPlan:
        """Write the plan and return it. A string is a shell command, in which $PYTHON is the Python of the tests."""
        settings: dict[str, Any] = {
            "scheduler": "local",
            "folder": str(self.experiment.path),
            "code": str(self.code),
            "python": sys.executable,
            "entrypoint": ("/bin/sh", "-c", entrypoint) if isinstance(entrypoint, str) else tuple(entrypoint),
            "environment": (f"PYTHON={sys.executable}",),
            "nodes": 1,
            "ranks_per_node": 2,
            "job_nodes": changes.get("nodes", 1),
            "job_slots_per_node": 2,
            "slot_type": "cpu",
            "max_restarts": 0,
        }
        plan = job_plan(**(settings | changes))
        write_atomic(self.experiment.plan, plan.to_json())
        return plan

    def plan_ranks(self, *ranks: int, argument: str = "", **changes: Any) -> None:
        """Plan an entrypoint that starts each of these ranks in a separate session and ends after the last one."""
        started = [f"setsid -w $PYTHON rank.py {rank} {argument} --trial &" for rank in ranks]
        self.plan(" ".join([*started, "wait"]), **changes)

    def start_agent(self, number: int = 1, through: Sequence[str] = (), **env: str) -> subprocess.Popen[bytes]:
        """Start an agent; on Slurm, `SLURM_NODEID` is its node. `through`: a command that executes its arguments."""
        nodes = {"SLURM_JOB_NODELIST": f"node[1-{JobPlan.of(self.experiment).nodes}]"}
        agent = [sys.executable, "-m", "hpc_det.launch.agent", str(self.trial.path), str(number), "0"]
        return self._start([*through, *agent], nodes | env)

    def start_job(
        self, workers: int = 1, /, agent: Sequence[str] = (sys.executable, "-m", "hpc_det.launch.agent"), **env: str
    ) -> subprocess.Popen[bytes]:
        job = [sys.executable, "-m", "hpc_det.launch.job", str(self.experiment.path), "1"]
        write_json(self.experiment.array(), asdict(JobArray(first=0, count=1, workers_each=workers)))
        return self._start([*job, "--", *agent], env)

    def write_script(self) -> Path:
        script, array = self.experiment.script(), JobArray(first=0, count=1)
        write_atomic(script, render(JobPlan.of(self.experiment), array, script))
        write_json(self.experiment.array(), asdict(array))
        return script

    def start_script(self) -> subprocess.Popen[bytes]:
        """Start the job's script as `bash jobs/1.sh` does."""
        return self._start(["bash", str(self.write_script())], {})

    def run_job(self, **env: str) -> tuple[int, str]:
        """Run a job to its end; return its exit code and the text that it added to the trial's log."""
        log = self.trial.job_log
        before = len(log.read_text()) if log.exists() else 0
        code = self.start_job(**env).wait(timeout=DEADLINE_S)
        return code, log.read_text()[before:] if log.exists() else ""

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = os.environ | self.env | env
        with self.printed.open("ab") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        self._processes.append(process)
        return process

    def wait_for_ranks(self, *ranks: int) -> list[int]:
        """Wait until all these ranks are up; return their process ids."""
        files = [self.code / f"rank-{rank}.up" for rank in ranks]
        wait_for(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def forget_ranks(self) -> None:
        for file in self.code.glob("rank-*.up"):
            file.unlink()

    def saved(self) -> dict[str, str]:
        """Return a map from each rank that saved to the reason."""
        return {path.stem.removeprefix("rank-"): path.read_text() for path in self.code.glob("rank-*.saved")}

    def ends(self) -> list[tuple[str, str]]:
        """Return cause and action of each attempt that has ended."""
        return [(event["cause"], event["action"]) for event in self.journal.events() if event["event"] == "ended"]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                for pid in (process.pid, *descendants(process.pid)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait()
