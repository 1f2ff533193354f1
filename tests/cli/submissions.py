"""A Slurm in which jobs wait forever, and the state that must hold after a submitting command was killed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_det.cli.main import main
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.submitting import submitter_of
from hpc_det.submit import executor  # noqa: F401  # loaded once, not by each process that is killed
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import state
from tests.cli.conftest import Command
from tests.schedulers.slurm.squeue_on_paper import KNOWS_NONE
from tests.stub import Stub

ARRAYS = """
name: tiny
entrypoint: model_def:MyTrial
searcher: {name: random, metric: accuracy, max_length: 10, max_trials: 5, max_concurrent_trials: 2}
"""

AWAY = "Unable to contact slurm controller (connect failure)"


@dataclass(frozen=True)
class Queue:
    """The queue as a folder with a file for each job, which contains the job's working folder."""

    folder: Path

    def jobs(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def queue(tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Stub Slurm. $KILLED is before or after: sbatch kills its caller before or after it queues the job."""
    folder = tmp_path / "queue"
    folder.mkdir()
    stub(
        "sbatch",
        f"""[ "$KILLED" = before ] && kill -KILL $PPID && exit 1
        work=$(sed -n 's/^#SBATCH --chdir=//p' "${{!#}}")
        job=$((4711 + $(ls {tmp_path}/ids 2>/dev/null | wc -l))); mkdir -p {tmp_path}/ids; touch {tmp_path}/ids/$job
        echo "$work" >{folder}/$job
        [ "$KILLED" = after ] && kill -KILL $PPID
        [ -n "$REFUSES" ] && echo "sbatch: error: $REFUSES" >&2 && exit 1
        echo $job""",
    )
    stub(
        "squeue",
        f"""[ -n "$AWAY" ] && echo "slurm_load_jobs error: {AWAY}" >&2 && exit 1
        cd {folder}
        for word; do case $word in
        --jobs=*) jobs=$(tr , ' ' <<<"${{word#*=}}"); found=
            for job in $jobs; do [ -e $job ] && found=yes && echo "$job|PENDING|Priority"; done
            [ -n "$found" ] || {{ {KNOWS_NONE}; }};;
        --Format=*) m=${{word#*JobArrayID:}}; m=${{m%%,*}}; for job in *; do [ -e "$job" ] && echo -n "$job${{m}}n$m$(
            id -un)${{m}}low${{m}}PENDING${{m}}Priority${{m}}N/A${{m}}N/A${{m}}0${{m}}9${{m}}cpu=1$m$(
            cat $job)${{m}}(null)$m"; done;;
        esac; done; true""",
    )
    stub("scancel", f"rm -f {folder}/${{!#}}")
    monkeypatch.setattr("hpc_det.schedulers.own_jobs.SETTLES_S", 0.0)
    monkeypatch.setattr("hpc_det.view.interrupted.BARE_FOR_S", 0.0)
    return Queue(folder)


@pytest.fixture
def arguments(config: Path, code: Path, root: Path) -> list[str]:
    return ["experiment", "create", str(config), str(code), "--cluster", "slurm"]


def in_a_process(arguments: list[str]) -> int:
    """Run `hpc-det ARGUMENTS` in a separate process; return its status as in waitpid(2)."""
    if (pid := os.fork()) == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(main(arguments))
        except SystemExit as error:
            os._exit(int(str(error.code)))
        finally:
            os._exit(99)
    return os.waitpid(pid, 0)[1]


def is_settled(root: Path, queue: Queue, *states: ExperimentState | None) -> None:
    """Assert that no job and no folder is left over after a kill and a listing. `states`: those allowed."""
    shown = list(ExperimentStore(root).all())
    known = [job for experiment in shown for job in ExperimentView(experiment).job_ids()]
    assert set(queue.jobs()) <= set(known)
    for experiment in ExperimentStore(root).folders():
        assert submitter_of(experiment) is None
        assert experiment.config.exists()
    for experiment in shown:
        now = state(ExperimentView(experiment))
        assert now in (states or (ExperimentState.QUEUED, ExperimentState.PAUSED)), now


def ends_well(hpc_det: Command, root: Path, queue: Queue) -> None:
    for experiment in list(ExperimentStore(root).all()):
        hpc_det("e", "kill", experiment.id)
        assert hpc_det("e", "delete", experiment.id, "--yes").code == 0
    assert queue.jobs() == []
    assert list(ExperimentStore(root).all()) == []
