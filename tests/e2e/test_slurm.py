"""Whole lives of gang jobs on a real Slurm: six ranks on three nodes, preempted, timed out, killed, still bit-equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import newest_steps
from hpc_det.node.process import is_stopped
from hpc_det.resources import data_path
from hpc_det.store.attempt import HOOK
from tests.e2e.story import DIRECT, WAITS_AT, Story, hpc_det
from tests.facts import refused, unnamed
from tests.labs.slurm import SlurmLab
from tests.launch.job import replaced

pytestmark = pytest.mark.slurm

SIX_SLOTS = "resources.slots_per_trial=6"
SIX_RANKS = (DIRECT, SIX_SLOTS)
"""For tests that do not depend on the launcher: torchrun would load torch once more on each node."""
PROFILE = """
name: lab
scheduler: slurm
slots_per_node: 2
max_nodes: 3
slot_type: cpu
cpus_per_slot: 1
resource_pool: low
signal_lead_s: 70
resume: requeue
"""


def use(lab: SlurmLab, patch: pytest.MonkeyPatch, profile: str | None = None) -> None:
    """Use a state folder that all nodes see, with a profile of the lab in it, by default `PROFILE`."""
    folder = lab.folder()
    (folder / "conf" / "cluster").mkdir(parents=True)
    (folder / "conf" / "cluster" / "lab.yaml").write_text(profile or PROFILE)
    patch.setenv("HPC_DET_ROOT", str(folder))
    lab.use(patch)


@pytest.fixture(scope="module")
def undisturbed(slurm_lab: SlurmLab) -> Story:
    """Return the same experiment, run without any trouble."""
    with pytest.MonkeyPatch.context() as patch:
        use(slurm_lab, patch)
        story = Story.begin(*SIX_RANKS, cluster="lab")
        story.wait()
    return story


@pytest.fixture(autouse=True)
def on_the_lab(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use(slurm_lab, monkeypatch)


def test_a_gang_of_six_ranks_on_three_nodes_trains_to_its_end(undisturbed: Story, slurm_lab: SlurmLab) -> None:
    assert undisturbed.causes == ["finished"]
    job = slurm_lab.wait_for_state(undisturbed.job_id, "COMPLETED")
    assert (job["NumNodes"], job["NodeList"]) == ("3", "node[1-3]")
    assert len(list(undisturbed.trial.rank_log(1, 0).parent.glob("rank-*.log"))) == 6


def test_a_preempted_gang_is_requeued_and_goes_on_bit_for_bit(undisturbed: Story, slurm_lab: SlurmLab) -> None:
    story = Story.begin(*SIX_RANKS, WAITS_AT.format(13), cluster="lab")
    story.until_batch(13)
    slurm_lab.preempt(3, seconds=2)
    waited = story.wait()
    assert story.causes == ["preempted", "finished"]
    assert "it may start now" in waited.stderr  # instead of the 121 s for which Slurm holds a requeued job
    assert slurm_lab.job(story.job_id)["Restarts"] == "1"
    assert story.same_as(undisturbed)


@pytest.mark.long
def test_a_gang_whose_installation_is_replaced_is_restarted_with_the_new_one_on_all_nodes(
    slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = slurm_lab.folder()
    replaced.install(installed)
    for data in ("conf", "slurm_templates"):
        (installed / data).symlink_to(data_path(data))
    monkeypatch.setenv("PYTHONPATH", str(installed))
    only_the_first_node = '[ "$HPC_DET_NUMBER" != 1 ] || [ "$SLURM_NODEID" = 0 ] || exec sleep 600'
    (tmp_path / "entrypoint.sh").write_text(f"{only_the_first_node}\n{replaced.REPLACES}")
    config = tmp_path / "config.yaml"
    config.write_text(
        "name: replaced\nentrypoint: bash entrypoint.sh\nmax_restarts: 1\n"
        "searcher: {metric: loss, max_length: {batches: 1}}\n"
        f"environment: {{environment_variables: [INSTALLED={installed}, IMPORTERS=1]}}\n"
    )
    story = Story.begin(SIX_SLOTS, cluster="lab", config=config, context=tmp_path)
    story.wait(check=False)
    assert story.causes == ["failed", "finished"]
    assert Counter((installed / "used").read_text().split()) == {"launch/job/worker.py": 1, "launch/agent.py": 3}
    assert slurm_lab.job(story.job_id)["Restarts"] == "0"


@pytest.mark.long
def test_a_suspended_gang_stops_on_all_nodes_and_goes_on_bit_for_bit(undisturbed: Story, slurm_lab: SlurmLab) -> None:
    story = Story.begin(SIX_SLOTS, "hyperparameters.batch_s=0.2", cluster="lab")
    story.until_batch(3)
    ranks = [story.rank_pid(rank) for rank in range(6)]
    slurm_lab.run("scontrol", "suspend", story.job_id)
    story.until(lambda: all(map(is_stopped, ranks)))
    assert story.describe()["state"] == "SUSPENDED"
    batches = story.batches_reported
    slurm_lab.run("scontrol", "resume", story.job_id)
    story.until(lambda: not any(map(is_stopped, ranks)))
    assert story.batches_reported <= batches + 1
    story.wait()
    assert story.causes == ["finished"]
    assert story.same_as(undisturbed)


@pytest.mark.long
def test_a_rank_killed_on_another_node_restarts_the_gang_in_the_same_job(
    undisturbed: Story, slurm_lab: SlurmLab
) -> None:
    story = Story.begin(SIX_SLOTS, WAITS_AT.format(20), "max_restarts=1", cluster="lab")
    story.until_batch(20)
    os.kill(story.rank_pid(2), signal.SIGKILL)
    story.wait()
    assert story.causes == ["failed", "finished"]
    assert "rank 2 on node2: process" in story.describe()["attempts"][0]["failure"]
    assert slurm_lab.job(story.job_id)["Restarts"] == "0"
    assert story.same_as(undisturbed)


@pytest.mark.long
def test_the_script_given_to_sbatch_by_hand_does_the_same_job(undisturbed: Story, slurm_lab: SlurmLab) -> None:
    held = Story.begin(SIX_SLOTS, "slurm.sbatch_args=[--hold]", cluster="lab")
    slurm_lab.run("scancel", held.job_id)
    script = held.trial.experiment().script()
    script.write_text(script.read_text().replace("#SBATCH --hold\n", ""))
    by_hand = slurm_lab.run("sbatch", "--parsable", str(script)).strip()
    slurm_lab.wait_for_state(by_hand, "COMPLETED")  # sbatch --wait would check after 2, 10 and 42 s
    assert held.same_as(undisturbed)


@pytest.mark.long
def test_without_accounting_an_experiment_is_created_watched_and_killed(
    slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", slurm_lab.path_without_accounting())
    assert subprocess.run(["sh", "-c", "command -v sacct"], capture_output=True).returncode
    story = Story.begin(SIX_SLOTS, WAITS_AT.format(1), cluster="lab")
    story.until_batch(1)
    assert story.describe()["state"] == "RUNNING"
    hpc_det("experiment", "kill", story.number)
    (listed,) = json.loads(hpc_det("experiment", "list", "--json").stdout)
    assert listed["state"] == "CANCELED"


def test_slurms_own_scancel_ends_an_experiment_that_saves_before_it_goes(slurm_lab: SlurmLab) -> None:
    story = Story.begin(DIRECT, "resources.slots_per_trial=4", WAITS_AT.format(3), cluster="lab")
    story.until_batch(3)
    slurm_lab.run("scancel", story.job_id)
    assert story.wait(check=False).returncode == 1
    assert story.causes == ["cancelled"]
    assert story.describe()["state"] == "CANCELED"
    assert newest_steps(story.trial.checkpoints) >= 3


@pytest.mark.long
def test_a_held_job_is_released_by_hand(slurm_lab: SlurmLab) -> None:
    story = Story.begin(SIX_SLOTS, WAITS_AT.format(1), cluster="lab")
    story.until_batch(1)
    slurm_lab.run("scontrol", "requeue", story.job_id)
    slurm_lab.wait_for_state(story.job_id, "PENDING")
    released = hpc_det("job", "release", story.job_id)
    assert not unnamed(released.stdout, f"job {story.job_id}")
    slurm_lab.wait_for_state(story.job_id, "RUNNING", 60)  # without the release it would start after 121 s
    story.until(lambda: len(story.causes) == 1)
    hpc_det("experiment", "kill", story.number)


def test_a_partition_that_does_not_exist_is_refused_and_nothing_is_left() -> None:
    with refused(AssertionError, "invalid partition specified: nowhere") as error:
        Story.begin(SIX_SLOTS, "resources.resource_pool=nowhere", cluster="lab")
    assert "Traceback" not in str(error.value)
    assert not list((Path(os.environ["HPC_DET_ROOT"]) / "experiments").iterdir())


@pytest.mark.long
def test_a_script_under_srun_that_fails_is_named_with_its_rank_and_exit_code() -> None:
    command = "test $RANK != 4 && sleep 60 || exit 9"
    entrypoint = f"entrypoint=python3 -m hpc_det.launch.srun sh -c '{command}'"
    story = Story.begin(entrypoint, SIX_SLOTS, "max_restarts=0", cluster="lab")
    assert story.wait(check=False).returncode == 1
    assert story.causes == ["failed"]
    assert story.describe()["attempts"][0]["failure"] == "rank 4 on node3: exit code 9"


@pytest.mark.long
def test_ranks_under_srun_see_what_the_startup_hook_of_their_own_node_exports(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / HOOK).write_text(
        "export OWN=$HPC_DET_NODE_RANK SLURM_PROCID=9\n[ $OWN != 0 ] || export ONLY_NODE_0=1\necho hook of $OWN\n"
    )
    script = 'echo "$RANK $OWN ${ONLY_NODE_0-none}" >"$HPC_DET_FOLDER/seen-$RANK"'
    entrypoint = f"entrypoint=[python3, -m, hpc_det.launch.srun, sh, -c, {json.dumps(script)}]"
    story = Story.begin(entrypoint, SIX_SLOTS, "max_restarts=0", cluster="lab", context=tmp_path)
    story.wait(check=False)
    seen = [path.read_text().split() for path in sorted(story.trial.path.glob("seen-*"))]
    nodes = [str(rank // 2) for rank in range(6)]
    only = ["1" if node == "0" else "none" for node in nodes]
    assert seen == [[str(rank), nodes[rank], only[rank]] for rank in range(6)], story.logged
    lines = {f"[node{node + 1}] hook of {node}" for node in range(3)}
    assert lines <= set(story.logged.splitlines())


RESTARTS = """
import os, signal, time
import torch, torch.distributed as dist
rank, attempt = os.environ["RANK"], os.environ["HPC_DET_NUMBER"]
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
above = [os.getppid()]
while b"hpc_det.launch.agent" not in open(f"/proc/{above[-1]}/cmdline", "rb").read():
    above.append(int(open(f"/proc/{above[-1]}/stat").read().rpartition(")")[2].split()[1]))
launcher, *kept = above
with open(f"kept-{attempt}-{rank}", "w") as file:
    file.write(" ".join(map(str, kept)))
dist.barrier()
if attempt == "1" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
elif attempt == "1":
    time.sleep(60)
"""


def test_a_gang_that_lost_a_rank_is_restarted_by_the_same_agents_and_fork_servers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESTARTS)
    config = tmp_path / "config.yaml"
    config.write_text(
        "{name: restarts, entrypoint: python3 -m hpc_det.launch.direct train.py, max_restarts: 1,"
        " resources: {slots_per_trial: 4}, searcher: {name: single, metric: loss, max_length: {batches: 1}}}"
    )
    hpc_det("experiment", "create", config, tmp_path, "--cluster", "lab", "--follow", check=False)
    (experiment,) = (Path(os.environ["HPC_DET_ROOT"]) / "experiments").iterdir()
    kept = {path.name: tuple(path.read_text().split()) for path in (experiment / "code").glob("kept-*")}
    assert len(kept) == 8
    assert {len(processes) for processes in kept.values()} == {2}  # the fork server, and the agent that started it
    assert len({*kept.values()}) == 2
    assert all(kept[f"kept-1-{rank}"] == kept[f"kept-2-{rank}"] for rank in range(4))
