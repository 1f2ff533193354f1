"""A job whose time limit is announced by its own clock alone: real ranks, stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.node.json_files import read_json
from hpc_det.store.attempt import read_stop
from hpc_det.store.save_times import read_each_save
from tests.e2e.story import WAITS_AT, WARM, Story
from tests.stub import Stub, stub
from tests.wait import DEADLINE_S

__all__ = ["stub"]

PROFILE = "{name: here, scheduler: slurm, slots_per_node: 2, slot_type: cpu, cpus_per_slot: 1, time_limit: 60}"
SRUN = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
SHOWS_THE_END = """
until grep -qs '"training"' {}; do sleep 0.02; done
echo JobState=RUNNING EndTime=$(date -d '+{} seconds' +%Y-%m-%dT%H:%M:%S)
"""


@pytest.mark.usefixtures("warm")
def test_a_job_saves_before_its_time_limit_and_the_run_goes_on_bit_for_bit(
    undisturbed_alone: Story, stub: Stub, state_folder: Path
) -> None:
    profiles = state_folder / "conf" / "cluster"
    profiles.mkdir(parents=True)
    (profiles / "here.yaml").write_text(PROFILE)
    stub("sbatch", "echo 7")
    stub("srun", SRUN)
    story = Story.begin(WARM, WAITS_AT.format(5), cluster="here")
    # When the job learns of its end, it already trains, and there is just enough time for a save.
    stub("scontrol", SHOWS_THE_END.format(story.trial.metrics, 40))
    run(story)
    assert story.causes == ["time limit"]
    outcome = read_json(story.trial.outcome)
    assert outcome is not None
    assert (outcome["kind"], outcome["saved"]) == ("stopped", True)
    saved = committed(story.trial.checkpoints)[0]
    assert 0 < saved.steps == outcome["steps"] < 40
    stop = read_stop(story.trial.stop, 1)
    assert stop is not None
    assert stop.deadline is not None
    assert stop.time < saved.time < stop.deadline

    stub("scontrol", SHOWS_THE_END.format(story.trial.metrics, 3600))
    run(story)
    assert story.causes == ["time limit", "finished"]
    assert story.same_as(undisturbed_alone)
    assert len(read_each_save(story.trial.saves)) > 1


def run(story: Story) -> None:
    """Run the script as Slurm does."""
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "here"}
    subprocess.run(["bash", story.trial.experiment().script()], check=True, timeout=DEADLINE_S, env=env)
