"""The same life under every launcher that starts ranks on a real Slurm: six ranks on three nodes, preempted once."""

from __future__ import annotations

import pytest

from tests.e2e import test_slurm
from tests.e2e.story import WAITS_AT, Story
from tests.labs.slurm import SlurmLab
from tests.launch import mpiruns

pytestmark = [pytest.mark.slurm, pytest.mark.long]

LAUNCHERS = {
    "srun": ("srun", "mpirun"),
    "deepspeed": ("deepspeed", "mpirun"),
    "mpich": ("mpi", mpiruns.MPICH),
    "open_mpi": ("mpi", "mpirun.openmpi"),
    "mpich_by_srun": ("mpi", "srun, --mpi=pmi2"),
}
"""Module of the launcher, and what the cluster's profile says of MPI."""


@pytest.fixture(scope="module")
def undisturbed(slurm_lab: SlurmLab) -> Story:
    """The same experiment under torchrun, without any trouble."""
    with pytest.MonkeyPatch.context() as patch:
        test_slurm.use(slurm_lab, patch)
        story = Story.begin(test_slurm.SIX_SLOTS, cluster="lab")
        story.wait()
    return story


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_preempted_gang_comes_back_and_goes_on_bit_for_bit(
    undisturbed: Story, slurm_lab: SlurmLab, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, mpi_launcher = LAUNCHERS[launcher]
    if launcher == "open_mpi":
        mpiruns.open_mpi()
    test_slurm.use(slurm_lab, monkeypatch, f"{test_slurm.PROFILE}mpi_launcher: [{mpi_launcher}]\n")
    story = Story.begin(
        f"entrypoint=python3 -m hpc_det.launch.{module} --trial model_def:StoryTrial",
        test_slurm.SIX_SLOTS,
        WAITS_AT.format(13),
        cluster="lab",
    )
    story.until_batch(13)
    slurm_lab.preempt(3, seconds=2)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert story.same_as(undisturbed)


def test_a_script_under_srun_that_fails_is_named_with_its_rank_and_exit_code(
    slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_slurm.use(slurm_lab, monkeypatch)
    command = "test $RANK != 4 && sleep 60 || exit 9"
    entrypoint = f"entrypoint=python3 -m hpc_det.launch.srun sh -c '{command}'"
    story = Story.begin(entrypoint, test_slurm.SIX_SLOTS, "max_restarts=0", cluster="lab")
    assert story.wait(check=False).returncode == 1
    assert story.causes == ["failed"]
    assert story.describe()["attempts"][0]["failure"] == "rank 4 on node3: exit code 9"
