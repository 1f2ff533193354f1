"""Findings about a Slurm site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from hpc_det.config.cluster_choice import Which
from hpc_det.doctor import Finding
from hpc_det.doctor.slurm import findings, requeue_delay_s, try_submission
from hpc_det.schedulers.scheduler import CommandError
from hpc_det.schedulers.slurm.detect import detect
from tests.doctor.sites import ATLAS, LAB, cluster, everything, on_path, one, slurm_site, verdicts
from tests.facts import golden, unnamed


def lab(config: Mapping[str, str] | None = None, srun: str = "", which: Which = everything) -> list[Finding]:
    """Return the findings about a site that preempts jobs of one partition by requeue, with 30 s of grace time."""
    run = slurm_site(LAB, srun, **(config or {}))
    return list(findings(detect(run), run, which))


def test_a_site_with_everything_has_no_problem() -> None:
    found = lab(srun="--container-image=IMAGE\nMPI plugin types are...\n\tnone\n\tpmi2\n\tpmix")
    assert set(verdicts(found)) == {"ok"}
    assert one(found, "22.05.8", "lab", "low, high")
    assert one(found, "partition low", "requeue", "GraceTime 30 s")
    assert one(found, "srun", "MPI", "pmi2, pmix")
    assert one(found, "slurmdbd")
    assert [finding.message for finding in found] == golden(__file__, "slurm.txt")


def test_without_a_grace_time_periodic_checkpoints_carry_it() -> None:
    run = slurm_site(ATLAS)
    found = one(findings(detect(run), run, everything), "GraceTime 0 s")
    assert (found.verdict, found.message.split()[1]) == ("note", "scavenge")
    assert "checkpoint_interval: auto" in found.remedy


def test_suspended_jobs_cannot_save() -> None:
    found = lab({"PreemptType": "preempt/qos", "PreemptMode": "SUSPEND,GANG"})
    assert {finding.verdict for finding in found if "suspend" in finding.message} == {"note"}


def test_a_site_that_preempts_nobody() -> None:
    assert one(lab({"PreemptType": "preempt/none"}), "preempted").verdict == "ok"


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"PreemptParameters": "send_user_signal"}, ["preempted", "send_user_signal"]),
        ({}, ["preempted", "TERM"]),
        ({"AccountingStorageType": "(null)"}, ["accounting"]),
        ({"JobRequeue": "0"}, ["JobRequeue=0"]),
        ({"MaxBatchRequeue": "5"}, ["requeued", 5, "held"]),
        ({"ProctrackType": "proctrack/cgroup"}, ["proctrack/cgroup"]),
        ({"SelectType": "select/linear"}, ["--gres", "select/linear"]),
    ],
)
def test_what_works_either_way(config: dict[str, str], facts: list[object]) -> None:
    assert one(lab(config), *facts).verdict == "ok"


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"ProctrackType": "proctrack/linuxproc"}, ["session"]),
        ({"MaxArraySize": "0"}, ["arrays"]),
    ],
)
def test_what_is_good_to_know(config: dict[str, str], facts: list[object]) -> None:
    assert one(lab(config), *facts).verdict == "note"


@pytest.mark.parametrize(
    ("info", "seconds"),
    [("(null)", 121), ("cred_expire=30", 31), ("socket=/run/munge,cred_expire=300,ttl=9", 301), ("", 121)],
)
def test_requeued_jobs_wait_for_their_credential(info: str, seconds: int) -> None:
    assert requeue_delay_s({"AuthInfo": info}) == seconds


def test_commands_that_are_missing() -> None:
    found = lab(which=on_path("sinfo", "srun", "scontrol", "squeue"))
    missing = one(found, "PATH", "sbatch, scancel")
    assert (missing.verdict, unnamed(missing.message, "sinfo")) == ("problem", ["sinfo"])


def test_the_imitation_of_torque_is_told_from_pbs() -> None:
    found = lab(which=on_path("sinfo", "sbatch", "squeue", "scontrol", "scancel", "srun", "qsub"))
    assert one(found, "qsub").verdict == "note"


def test_an_srun_without_mpi() -> None:
    assert one(lab(srun="MPI plugin types are...\n\tnone"), "srun", "MPI").remedy == "keep mpi_launcher: [mpirun]"


def test_an_srun_that_does_not_answer_is_not_one_without_pyxis() -> None:
    def silent(command: Sequence[str]) -> str:
        if command[0] == "srun":
            raise CommandError("srun: no answer in 5 s; try again later")
        return run(command)

    run = slurm_site(LAB)
    found = list(findings(detect(run), silent, everything))
    assert one(found, "pyxis").verdict == "note"
    assert one(found, "MPI").remedy == "keep mpi_launcher: [mpirun]"


def test_a_submission_is_tried_as_the_profile_makes_it() -> None:
    profile = cluster(
        account="physics", qos="long", time_limit="01:00:00", cpus_per_slot=4, pools={"low": {"slots_per_node": 8}}
    )
    assert try_submission(profile, "low") == (
        "sbatch",
        "--test-only",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=32",
        "--partition=low",
        "--account=physics",
        "--qos=long",
        "--time=60",
        "--gpus-per-node=8",
        "--wrap=true",
    )
