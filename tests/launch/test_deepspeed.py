from __future__ import annotations

import base64
import json
import sys

import pytest

from hpc_det.errors import UsageError
from hpc_det.launch.deepspeed import launch_command
from hpc_det.launch.launchers.arguments import Launch, parse
from hpc_det.launch.launchers.rank import with_local_rank
from hpc_det.store.attempt import first_failure
from tests.facts import refused
from tests.launch.gang import Gang
from tests.store.test_attempt import ATTEMPT
from tests.wait import DEADLINE_S


def world(command: list[str]) -> dict[str, list[str]]:
    (world_info,) = [word.partition("=")[2] for word in command if word.startswith("--world_info=")]
    decoded: dict[str, list[str]] = json.loads(base64.urlsafe_b64decode(world_info))
    return decoded


def test_every_node_is_told_the_gangs_shape_its_number_and_where_to_meet() -> None:
    command = launch_command(parse(["--trial", "m:C"], "deepspeed"), ATTEMPT, {})
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.launch"]
    assert world(command) == {"node-0": list("0123"), "node-1": list("0123")}
    assert command[4:7] == ["--node_rank=1", "--master_addr=10.0.0.7", "--master_port=15001"]
    assert command[7:] == [
        "--no_local_rank",
        "--log_level=warning",
        "--module",
        "hpc_det.launch.launchers.rank",
        "deepspeed",
        "-m",
        "hpc_det.launch.rank",
        "m:C",
    ]


def test_ranks_see_the_devices_that_the_scheduler_gave() -> None:
    command = launch_command(Launch((), ("train.py",)), ATTEMPT, {"CUDA_VISIBLE_DEVICES": "2,3,6,7"})
    assert world(command)["node-1"] == ["2", "3", "6", "7"]


def test_overrides_are_the_per_node_launchers_flags_and_those_of_the_runner_are_refused() -> None:
    launch = Launch(("--bind_cores_to_rank",), ("train.py",))
    command = launch_command(launch, ATTEMPT, {})
    assert command[8:12] == ["--bind_cores_to_rank", "--module", "hpc_det.launch.launchers.rank", "deepspeed"]
    with refused(UsageError, "--num_gpus"):
        launch_command(Launch(("--num_gpus", "2"), ("train.py",)), ATTEMPT, {})


@pytest.mark.parametrize(
    ("words", "argument", "expected"),
    [
        ("train.py --lr 1", "--local_rank=1", "train.py --local_rank=1 --lr 1"),
        ("-m package.train a", "--local_rank=1", "-m package.train --local_rank=1 a"),
        ("train.py --lr 1", None, "train.py --lr 1"),
        ("bash run.sh", None, "bash run.sh"),
    ],
)
def test_a_script_gets_its_local_rank_where_deepspeed_puts_it(words: str, argument: str | None, expected: str) -> None:
    assert with_local_rank(words.split(), argument) == expected.split()


SHOWS = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
with open("told-" + os.environ["RANK"], "w") as file:
    file.write(" ".join([*(os.environ[name] or "none" for name in names), *sys.argv[1:]]))
if sys.argv[2:] == [os.environ["RANK"]]:
    sys.exit(5)
"""


def run(gang: Gang, words: str) -> list[int]:
    (gang.code / "train.py").write_text(SHOWS)
    entrypoint = f"exec $PYTHON -m hpc_det.launch.deepspeed {words}"
    gang.plan(entrypoint, scheduler="slurm", nodes=2, ranks_per_node=1)
    agents = [gang.start_agent(SLURM_NODEID=str(node)) for node in (0, 1)]
    return [agent.wait(timeout=DEADLINE_S) for agent in agents]


@pytest.mark.integration
def test_the_real_launcher_starts_the_ranks_of_two_nodes(gang: Gang) -> None:
    assert run(gang, "train.py") == [0, 0], gang.printed.read_text()
    written = [(gang.code / f"told-{rank}").read_text() for rank in (0, 1)]
    assert written == ["0 2 0 1 cpu none --local_rank=0", "1 2 0 1 cpu none --local_rank=0"]
    assert "launch.py" not in gang.printed.read_text()


@pytest.mark.long
def test_a_script_that_fails_is_named_with_its_rank(gang: Gang) -> None:
    assert 1 in run(gang, "-q -- train.py 1")
    failed = first_failure(gang.trial, 1)
    assert failed is not None
    assert (failed.rank, failed.message) == (1, "exit code 5")
