"""The resume cases: kinds of training and launchers x events that can stop a gang, on this machine, on PBS and on
Slurm.

Each case trains, is stopped as its column says, resumes, and ends bit-equal to an uninterrupted run. T: in `make test`;
L: in `make test-long`; .: there is no such case. Other effects of a single mechanism have separate tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pytest

import hpc_det as package
from hpc_det.node.json_files import read_json
from tests.e2e import test_slurm
from tests.e2e.engine_story import UndisturbedEngines
from tests.e2e.resume_cases import ANYWHERE, Training, Trouble, assert_resumed_exactly, cases, run, write_profile
from tests.e2e.story import WAITS_AT, Story
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.listening import is_closed_to_others
from tests.machine import slowness

# --- on this machine

ON_THIS_MACHINE = """
                        preempted  one_rank_signalled  pause  crash  hang
trial  torch_distributed    L              .             .      .      .
trial  direct               .              L             L      L      L
trial  mpich                L              .             .      .      .
trial  open_mpi             L              .             .      .      .
trial  deepspeed            L              .             .      .      .
script direct               L              .             .      L      .
script torch_distributed    L              .             .      .      .
zero2  direct               .              .             L      L      .
"""


@dataclass(frozen=True)
class ThisMachine:
    root: Path

    def write_profile(self, training: Training, resume: str) -> None:
        write_profile(
            self.root,
            f"name: lab\nscheduler: local\nslots_per_node: {training.slots}\nmax_nodes: 1\nslot_type: cpu\n"
            f"mpi_launcher: [{training.mpi_launcher()}]\n",
        )


def the_agent_terminated(place: object, story: Story) -> None:
    (agent,) = story.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)


def a_rank_signalled(place: object, story: Story) -> None:
    os.kill(story.rank_pid(1), signal.SIGUSR2)


TROUBLES_HERE = {
    "preempted": Trouble(the_agent_terminated, ("preempted", "finished")),
    "one_rank_signalled": Trouble(a_rank_signalled, ("preempted", "finished")),
    **ANYWHERE,
}


@pytest.mark.parametrize(("training", "trouble"), cases(ON_THIS_MACHINE))
def test_on_this_machine(
    undisturbed: Story,
    undisturbed_engines: UndisturbedEngines,
    state_folder: Path,
    training: Training,
    trouble: str,
) -> None:
    found = TROUBLES_HERE[trouble]
    comes = found.comes

    def closed_to_others_and(place: object, story: Story) -> None:
        if training.module != "mpi" and not training.is_engine:  # MPI libraries and DeepSpeed's own groups listen, too
            assert is_closed_to_others([story.rank_pid(rank) for rank in range(training.slots)])
        comes(place, story)

    story = run(ThisMachine(state_folder), training, replace(found, comes=closed_to_others_and))
    assert_resumed_exactly(story, training, undisturbed, undisturbed_engines)


# --- on PBS: two nodes

ON_PBS = """
              requeued deleted suspended walltime first_node_lost other_node_lost pause crash hang
trial direct               T        L       L         L        L               L               L     L     L
trial torch_distributed    L        L       L         L        L               L               L     L     L
trial mpich                L        L       L         L        L               L               L     L     L
trial open_mpi             L        L       L         L        L               L               L     L     L
trial deepspeed            L        L       L         L        L               L               L     L     L
script torch_distributed   .        L       .         .        .               .               .     .     .
zero3 deepspeed            L        L       .         .        .               .               .     .     .
pipeline deepspeed         L        L       .         .        .               .               .     .     .
"""
ON_PBS_WITH_OTHER_MODES = """
              requeued deleted walltime pause
trial direct  L        L       L        L
"""
PBS_PROFILE = """
name: lab
scheduler: pbs
slots_per_node: {slots_per_node}
max_nodes: 3
slot_type: cpu
resource_pool: low
setup: ["export PYTHONPATH={repository}"]
resume: {resume}
mpi_launcher: [{mpi_launcher}]
"""


@dataclass(frozen=True)
class OnPbs:
    lab: PbsLab
    root: Path

    def write_profile(self, training: Training, resume: str) -> None:
        self.lab.set_kill_delay("low", 30 if training.slots == 2 else 60)  # the machine may be slow
        text = PBS_PROFILE.format(
            slots_per_node=training.slots // 2,
            repository=Path(package.__file__).parents[1],
            resume=resume,
            mpi_launcher=training.mpi_launcher(),
        )
        write_profile(self.root, text)


def preempted_in_order(letter: str) -> Callable[[OnPbs, Story], None]:
    def comes(place: OnPbs, story: Story) -> None:
        place.lab.set_preempt_order(letter)
        place.lab.preempt(3)

    return comes


def past_its_walltime(place: OnPbs, story: Story) -> None:
    place.lab.run("qalter", "-l", "walltime=1", story.job_id)


def pbs_node_lost(number: int) -> Callable[[OnPbs, Story], None]:
    def comes(place: OnPbs, story: Story) -> None:
        place.lab.fail_node(place.lab.nodes[number])

    return comes


TROUBLES_ON_PBS = {
    "requeued": Trouble(preempted_in_order("R"), ("preempted", "finished"), jobs=1),
    "deleted": Trouble(preempted_in_order("D"), ("preempted", "finished"), jobs=2),
    "suspended": Trouble(
        preempted_in_order("S"), ("finished",), (WAITS_AT.format(-1), "hyperparameters.batch_s=0.3"), jobs=1
    ),
    "walltime": Trouble(past_its_walltime, ("time limit", "finished"), jobs=2),
    "first_node_lost": Trouble(pbs_node_lost(0), ("node lost", "finished"), jobs=1),
    "other_node_lost": Trouble(pbs_node_lost(1), ("node lost", "finished"), jobs=1),
    **ANYWHERE,
}


@pytest.mark.parametrize(("training", "trouble"), cases(ON_PBS))
def test_on_pbs(
    undisturbed: Story,
    undisturbed_engines: UndisturbedEngines,
    pbs_lab: PbsLab,
    state_folder: Path,
    training: Training,
    trouble: str,
) -> None:
    story = run(OnPbs(pbs_lab, state_folder), training, TROUBLES_ON_PBS[trouble])
    assert_resumed_exactly(story, training, undisturbed, undisturbed_engines)


@pytest.mark.parametrize("resume", ["resubmit", "chain"])
@pytest.mark.parametrize(("training", "trouble"), cases(ON_PBS_WITH_OTHER_MODES))
def test_on_pbs_with_each_resume_mode(
    undisturbed: Story, pbs_lab: PbsLab, state_folder: Path, training: Training, trouble: str, resume: str
) -> None:
    found = replace(TROUBLES_ON_PBS[trouble], resume=resume, jobs=None)
    assert run(OnPbs(pbs_lab, state_folder), training, found).same_as(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("pbs_lab", [{"sister_lost_s": 360}], indirect=True)
def test_a_node_lost_minutes_before_pbs_notices_is_left_and_nobody_is_charged(
    undisturbed: Story, pbs_lab: PbsLab, state_folder: Path
) -> None:
    trouble = replace(TROUBLES_ON_PBS["other_node_lost"], overrides=("max_restarts=0",), jobs=None)
    assert run(OnPbs(pbs_lab, state_folder), Training("trial", "direct"), trouble).same_as(undisturbed)


# --- on Slurm: two nodes

ON_SLURM = """
         preempted time_limit node_lost pause crash hang requeued node_lost_requeued resubmitted out_of_time_resubmitted
trial direct               L L L L L L L L L L
trial torch_distributed    T L L L L L . . . .
trial mpich                L L L L L L . . . .
trial open_mpi             L L L L L L . . . .
trial deepspeed            L L L L L L . . . .
trial srun                 L L L L L L . . . .
trial mpich_by_srun        L L L L L L . . . .
script torch_distributed   L . . . . . . . . .
zero1 deepspeed            . . . . . . L . . .
zero3 direct               L . . . . . . . . .
pipeline deepspeed         L . . . . . . . . .
"""
SLURM_PROFILE = """
name: lab
scheduler: slurm
slots_per_node: {slots_per_node}
max_nodes: 3
slot_type: cpu
resource_pool: low
signal_lead_s: 70
resume: {resume}
mpi_launcher: [{mpi_launcher}]
"""
LONGEST_GAP_S = 6
"""Longest time [s] from the moment when nodes are free to the start of a successor: one round of this lab's scheduler
takes 2 s, and its steps twice as long. It is longer on a slow machine. A requeued job would wait for 121 s, or 3 s and
a release.
"""


@dataclass(frozen=True)
class OnSlurm:
    lab: SlurmLab
    patch: pytest.MonkeyPatch

    def write_profile(self, training: Training, resume: str) -> None:
        text = SLURM_PROFILE.format(
            slots_per_node=training.slots // 2, resume=resume, mpi_launcher=training.mpi_launcher()
        )
        test_slurm.use(self.lab, self.patch, text)


def preempted_by_slurm(place: OnSlurm, story: Story) -> None:
    place.lab.preempt(3, seconds=0)


def out_of_time(place: OnSlurm, story: Story) -> None:
    """Set the time limit below the elapsed time; Slurm checks limits every 30 s."""
    place.lab.run("scontrol", "update", f"JobId={story.job_id}", "TimeLimit=1")


def slurm_node_lost(place: OnSlurm, story: Story) -> None:
    """Mark the second node as lost, and resume it at once, so that another node is available."""
    name = (read_json(story.trial.nodes(1)) or [])[1]
    place.lab.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")
    with suppress(RuntimeError):  # Slurm may have resumed it already
        place.lab.run("scontrol", "update", f"NodeName={name}", "State=RESUME")


TROUBLES_ON_SLURM = {
    "preempted": Trouble(preempted_by_slurm, ("preempted", "finished"), jobs=2),
    "time_limit": Trouble(out_of_time, ("time limit", "finished"), jobs=2),
    "node_lost": Trouble(slurm_node_lost, ("node lost", "finished")),
    **ANYWHERE,
    "requeued": Trouble(preempted_by_slurm, ("preempted", "finished"), resume="requeue", jobs=1),
    # By the time Slurm is asked, it has requeued the job, and no longer shows the reason.
    "node_lost_requeued": Trouble(slurm_node_lost, ("preempted", "finished"), resume="requeue"),
    "resubmitted": Trouble(preempted_by_slurm, ("preempted", "finished"), resume="resubmit", jobs=2),
    "out_of_time_resubmitted": Trouble(out_of_time, ("time limit", "finished"), resume="resubmit", jobs=2),
}


@pytest.mark.slurm
@pytest.mark.parametrize(("training", "trouble"), cases(ON_SLURM))
def test_on_slurm(
    undisturbed: Story,
    undisturbed_engines: UndisturbedEngines,
    slurm_lab: SlurmLab,
    monkeypatch: pytest.MonkeyPatch,
    training: Training,
    trouble: str,
) -> None:
    story = run(OnSlurm(slurm_lab, monkeypatch), training, TROUBLES_ON_SLURM[trouble])
    assert_resumed_exactly(story, training, undisturbed, undisturbed_engines)
    if trouble == "preempted":
        assert gap_s(slurm_lab, story) <= LONGEST_GAP_S * slowness()


def gap_s(lab: SlurmLab, story: Story) -> float:
    """Return the time [s] from the end of the job that preempted the first one to the start of the second one."""
    first, second = (lab.job(attempt["job_id"]) for attempt in story.describe()["attempts"])
    assert int(second["JobId"]) == int(first["JobId"]) + 1  # submitted when the first one started
    preempter = lab.job(int(second["JobId"]) + 1)
    gap = datetime.fromisoformat(second["StartTime"]) - datetime.fromisoformat(preempter["EndTime"])
    print(f"the successor started {gap.total_seconds():.0f} s after the nodes were free")
    return gap.total_seconds()
