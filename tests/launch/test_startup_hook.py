"""startup-hook.sh, which the agent of each node sources before the entrypoint, as real processes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.json_files import read_map
from hpc_det.plan.container import HPC_DET
from hpc_det.plan.planner import _argv
from hpc_det.store.attempt import HOOK, Failure, first_failure, request_stop
from tests.facts import unnamed
from tests.launch import mpiruns
from tests.launch.gang import Gang, is_there
from tests.launch.runtimes import Runtime
from tests.launch.test_container import settings
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

SHOWS = """
import os, sys
name = "seen-" + os.environ.get("RANK", "none")
with open(os.path.join(os.environ["HPC_DET_FOLDER"], name), "w") as file:
    file.write("\\0".join(f"{name}={value}" for name, value in os.environ.items()))
"""


SEEN = "env -0 >$HPC_DET_FOLDER/seen-none"
"""An entrypoint that writes its environment for `seen`."""


def hooked(gang: Gang, hook: str, entrypoint: str | Sequence[str] = SEEN, **plan: Any) -> None:
    """Write the hook and a plan with it."""
    (gang.code / HOOK).write_text(hook)
    gang.plan(entrypoint, startup_hook=True, **plan)


def seen(gang: Gang, rank: int | str = "none") -> dict[str, str]:
    """Return the environment of a rank, or of an entrypoint without ranks."""
    items = (gang.trial.path / f"seen-{rank}").read_text().rstrip("\0").split("\0")
    return dict(item.split("=", 1) for item in items)


def run(gang: Gang, nodes: int = 1, **env: str) -> list[int]:
    of_nodes = [{"SLURM_NODEID": str(node)} if nodes > 1 else {} for node in range(nodes)]
    agents = [gang.start_agent(1, (), **of_node, **env) for of_node in of_nodes]
    return [agent.wait(timeout=DEADLINE_S) for agent in agents]


def failure(gang: Gang, attempt: int = 1) -> Failure:
    found = first_failure(gang.trial, attempt)
    assert found is not None
    return found


# --- what the ranks see


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 train.py",
        ["python3", "train.py"],
        "python3 -m hpc_det.launch.direct train.py",
        pytest.param(
            "python3 -m hpc_det.launch.torch_distributed --max-restarts=0 -- train.py", marks=pytest.mark.long
        ),
        "python3 -m determined.launch.torch_distributed python3 train.py",
    ],
)
def test_ranks_see_what_the_hook_exports(gang: Gang, entrypoint: str | list[str]) -> None:
    (gang.code / "train.py").write_text(SHOWS)
    hook = "pwd; export A='two words' PATH=$PATH:/of-the-hook PYTHONPATH=/libs:$PYTHONPATH\nB=local; unset C\n"
    variables = ("HPC_DET_COMPAT=determined", "C=1")
    hooked(gang, hook, _argv(entrypoint, "python3"), ranks_per_node=1, environment=variables)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert run(gang, PATH=path) == [0], gang.printed.read_text()
    found = seen(gang, 0 if "hpc_det.launch" in entrypoint or "determined" in entrypoint else "none")
    assert found["A"] == "two words"
    assert found["PATH"].endswith(":/of-the-hook")
    assert found["PYTHONPATH"].startswith("/libs:")
    assert str(gang.code) in found["PYTHONPATH"].split(":")
    assert {"B", "C"}.isdisjoint(found)
    assert str(gang.code) in gang.printed.read_text().splitlines()


def test_the_hook_needs_no_execute_bit_and_is_one_shell_with_the_entrypoint(gang: Gang) -> None:
    hooked(gang, "mkdir sub; cd sub; umask 027; ulimit -n 100; exec 3>x", "pwd; umask; ulimit -n")
    assert not os.access(gang.code / HOOK, os.X_OK)
    assert run(gang) == [0]
    assert gang.printed.read_text().split() == [str(gang.code / "sub"), "0027", "100"]


def test_the_hook_can_return_early_and_may_leave_odd_options_behind(gang: Gang) -> None:
    odd = "set -u -C -f -o pipefail; shopt -s nullglob; shift $#; trap 'echo $BASH_COMMAND' DEBUG; IFS=/; set -x -v"
    hooked(gang, f"{odd}\nif true; then return 0; fi\nexport TOO_FAR=1\n")
    assert run(gang) == [0], gang.printed.read_text()
    assert "TOO_FAR" not in seen(gang)
    assert seen(gang)["HPC_DET_SECRET"] not in gang.printed.read_text()


@pytest.mark.parametrize(
    "hook",
    [
        "exec 10>lock10; exec 11>lock11; exec 200>lock200",
        "echo() { builtin echo mine; }; exec() { :; }; export() { :; }; printf() { :; }; read() { :; }; set() { :; }",
        "shopt -s expand_aliases; alias echo=false exec=false builtin=false export=false",
    ],
)
def test_whatever_descriptors_and_names_the_hook_uses_the_entrypoint_prints_to_the_log(gang: Gang, hook: str) -> None:
    hooked(gang, f"{hook}\nHPC_DET_NUMBER=9", "printf shown; printf $HPC_DET_NUMBER >&2")
    assert run(gang) == [0]
    note, shown = gang.printed.read_text().splitlines()
    assert ("HPC_DET_NUMBER" in note, shown) == (True, "shown1")


def test_a_note_follows_output_without_an_end_of_line_on_its_own_line(gang: Gang) -> None:
    hooked(gang, "printf partial; export HPC_DET_NUMBER=9 RANK=77", "echo $RANK")
    assert run(gang) == [0]
    partial, *notes, shown = gang.printed.read_text().splitlines()
    assert (partial, [note.startswith("hpc-det: note: ") for note in notes], shown) == ("partial", [True] * 2, "77")


def test_variables_of_hpc_det_keep_their_values_with_a_note(gang: Gang) -> None:
    (gang.code / "train.py").write_text(SHOWS)
    lines = (
        "export HPC_DET_NUMBER=9 HPC_DET_SECRET=x CUDA_VISIBLE_DEVICES=3 RANK=7 PYTHONPATH=/mine; unset HPC_DET_SOCKET"
    )
    hooked(gang, lines, f"{sys.executable} -m hpc_det.launch.direct train.py", ranks_per_node=1)
    assert run(gang) == [0], gang.printed.read_text()
    found = seen(gang, 0)
    assert (found["HPC_DET_NUMBER"], found["CUDA_VISIBLE_DEVICES"], found["RANK"]) == ("1", "", "0")
    assert found["PYTHONPATH"].split(":")[0] == str(gang.code)
    assert found["PYTHONPATH"].split(":")[-1] == "/mine"
    notes = [line for line in gang.printed.read_text().splitlines() if "note:" in line]
    for name in ("HPC_DET_NUMBER", "HPC_DET_SECRET", "HPC_DET_SOCKET", "CUDA_VISIBLE_DEVICES", "RANK"):
        assert sum(f" {name} " in note for note in notes) == 1, notes
    assert found["HPC_DET_SECRET"] not in gang.printed.read_text()


def test_without_changes_there_are_no_notes_and_no_other_output(gang: Gang) -> None:
    hooked(gang, "# nothing\n", "true")
    assert run(gang) == [0]
    assert gang.printed.read_text() == ""


# --- two nodes


TWO: dict[str, Any] = {"scheduler": "slurm", "nodes": 2, "ranks_per_node": 1}


@pytest.mark.parametrize("health_checks", [True, False])
def test_each_node_runs_it_once_and_its_ranks_see_its_own_exports(gang: Gang, health_checks: bool) -> None:
    (gang.code / "train.py").write_text(SHOWS)
    hook = 'echo $HPC_DET_NODE_RANK >>ran; echo hello; export OWN="of node $HPC_DET_NODE_RANK"'
    hooked(gang, hook, f"exec {sys.executable} -m hpc_det.launch.direct train.py", health_checks=health_checks, **TWO)
    assert run(gang, 2) == [0, 0], gang.printed.read_text()
    assert sorted((gang.code / "ran").read_text().split()) == ["0", "1"]
    assert [seen(gang, rank)["OWN"] for rank in (0, 1)] == ["of node 0", "of node 1"]
    assert sorted(gang.printed.read_text().splitlines()) == ["[node1] hello", "[node2] hello"]


def test_no_entrypoint_starts_before_the_last_hook_has_ended(gang: Gang) -> None:
    waits = "if [ $HPC_DET_NODE_RANK = 1 ]; then touch waits; until [ -e go ]; do sleep 0.05; done; fi"
    hook = f'{waits}; touch "done-$HPC_DET_NODE_RANK"'
    hooked(gang, hook, 'ls done-* >"began-$HPC_DET_NODE_RANK"', **TWO)
    agents = [gang.start_agent(SLURM_NODEID=str(node)) for node in (0, 1)]
    wait_for(lambda: (gang.code / "waits").exists() and (gang.code / "done-0").exists())
    times = read_map(gang.trial.startup_hook(1)) or {}
    assert times["ended"] is None
    (gang.code / "go").touch()
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0], gang.printed.read_text()
    assert [(gang.code / f"began-{node}").read_text().split() for node in (0, 1)] == [["done-0", "done-1"]] * 2
    times = read_map(gang.trial.startup_hook(1)) or {}
    assert times["began"] < times["ended"]


def test_a_hook_that_fails_on_one_node_ends_the_gang_and_is_named_with_its_node(gang: Gang) -> None:
    hook = "if [ $HPC_DET_NODE_RANK = 1 ]; then echo no wheel for this node >&2; exit 4; fi; sleep 1000"
    hooked(gang, hook, "touch began", **TWO)
    assert run(gang, 2) == [1, 1]
    assert failure(gang).startup_hook
    assert unnamed(failure(gang).sentence(), HOOK, "exit code 4", "no wheel for this node") == []
    assert not (gang.code / "began").exists()


# --- failures


def test_a_failing_command_is_the_attempts_failure_with_its_last_lines(gang: Gang) -> None:
    hooked(gang, "for i in $(seq 30); do echo line $i; done\nfalse\ntouch went-on\n", "touch began")
    assert run(gang) == [1]
    found = failure(gang)
    assert (found.startup_hook, found.rank, found.user_error) == (True, None, False)
    assert unnamed(found.sentence(), HOOK, found.host, "exit code 1", "line 30", gang.trial.job_log) == []
    assert found.traceback.splitlines() == [f"line {i}" for i in range(21, 31)]
    assert gang.printed.read_text().splitlines() == [f"line {i}" for i in range(1, 31)]
    assert not {"went-on", "began"} & set(os.listdir(gang.code))


@pytest.mark.parametrize(
    "before", ["", "trap 'echo own' EXIT\n", "set +e; false; set -e\n"], ids=["", "trap", "set +e"]
)
@pytest.mark.parametrize("command", ["false", "check() { false; }; check", "(exit 3)"])
def test_a_command_that_fails_without_a_word_is_named_by_its_line(gang: Gang, before: str, command: str) -> None:
    hooked(gang, f"{before}true\n{command}\ntrue\n", "true")
    assert run(gang) != [0]
    assert unnamed(failure(gang).sentence(), f"line {2 + before.count(chr(10))}") == []


def test_a_failing_hook_counts_as_a_restart_and_runs_again_in_each_attempt(gang: Gang) -> None:
    hooked(gang, "echo ran >>runs; printf 'without an end of line'; no-such-command-of-ours", "true", max_restarts=1)
    code, log = gang.run_job()
    assert code != 0
    assert gang.ends() == [("failed", "restart"), ("failed", "give up")]
    assert (gang.code / "runs").read_text().split() == ["ran", "ran"]
    assert unnamed(log, HOOK, "exit code 127", "no-such-command-of-ours") == []


def test_a_hook_that_succeeds_the_second_time_starts_the_entrypoint(gang: Gang) -> None:
    hooked(gang, "[ -e tried ] || { touch tried; exit 9; }", "touch began", max_restarts=1)
    gang.run_job()
    assert gang.ends()[0] == ("failed", "restart")
    assert gang.ends()[1][0] == "finished"
    assert (gang.code / "began").exists()


def test_exit_0_in_the_hook_is_a_permanent_error_and_not_a_finished_trial(gang: Gang) -> None:
    hooked(gang, "echo all there; exit 0", "touch began", max_restarts=3)
    code, log = gang.run_job()
    assert code != 0
    assert gang.ends() == [("failed", "give up")]
    assert unnamed(log, HOOK, "exit code 0", "return") == []
    assert not (gang.code / "began").exists()


def test_a_killed_hook_is_named_with_the_signal(gang: Gang) -> None:
    for kills in ("kill -KILL $$", "sh -c 'kill -KILL $$'"):
        hooked(gang, kills, "true")
        agent = gang.start_agent(attempt := 1 + kills.startswith("sh"), ())
        assert agent.wait(timeout=DEADLINE_S) == 1
        assert unnamed(failure(gang, attempt).sentence(), HOOK, "SIGKILL", "OOM killer ended no process") == []


def test_a_failing_entrypoint_is_not_blamed_on_the_hook(gang: Gang) -> None:
    hooked(gang, "echo fine", "exit 3")
    assert run(gang) == [1]
    assert not failure(gang).startup_hook
    assert "exit code 3" in failure(gang).message


# --- stop requests


WAITS = "echo $$ >pid.part; mv pid.part pid; sleep 1000"


@pytest.mark.parametrize(
    ("reason", "end"),
    [("pause", ("paused", "pause")), ("cancel", ("cancelled", "done")), ("kill", ("cancelled", "done"))],
)
def test_a_stop_request_ends_the_hook(gang: Gang, reason: Any, end: tuple[str, str]) -> None:
    hooked(gang, WAITS, "touch began")
    job = gang.start_job()
    wait_for((gang.code / "pid").exists)
    shell = int((gang.code / "pid").read_text())
    request_stop(gang.trial.stop, attempt=1, reason=reason, source="a test")
    job.wait(timeout=DEADLINE_S)
    assert gang.ends() == [end]
    assert not is_there(shell)
    assert not (gang.code / "began").exists()


def test_a_signal_to_the_agent_ends_the_hook(gang: Gang) -> None:
    hooked(gang, WAITS, "touch began")
    agent = gang.start_agent()
    wait_for((gang.code / "pid").exists)
    agent.terminate()
    assert agent.wait(timeout=DEADLINE_S) == 1
    assert not is_there(int((gang.code / "pid").read_text()))
    assert first_failure(gang.trial, 1) is None


def test_a_program_that_the_hook_leaves_running_prints_to_the_log_and_ends_with_the_attempt(gang: Gang) -> None:
    daemon = "(echo $BASHPID >pid; while true; do echo beats; sleep 0.05; done) &"
    hooked(gang, daemon, "sleep 0.3")
    assert run(gang) == [0]
    assert gang.printed.read_text().count("beats\n") > 1
    assert not is_there(int((gang.code / "pid").read_text()))


# --- containers


@pytest.fixture(params=["apptainer", "podman"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Runtime:
    return Runtime.install(request.param, tmp_path / "site")


def test_in_a_container_it_runs_inside(gang: Gang, runtime: Runtime) -> None:
    hook = "echo from $FROM; pwd; export OWN=1 HPC_DET_NUMBER=4 PYTHONPATH=/mine"
    hooked(gang, hook, **settings(runtime))
    assert run(gang, PATH=runtime.path, OF_THE_HOST="1") == [0], gang.printed.read_text()
    found = seen(gang)
    assert (found["OWN"], found["FROM"], found["HPC_DET_NUMBER"]) == ("1", "the-image", "1")
    assert found["PYTHONPATH"] == f"{gang.code}:{HPC_DET}:/mine"
    assert "OF_THE_HOST" not in found
    said, where, note = gang.printed.read_text().splitlines()
    assert (said, where) == ("from the-image", str(gang.code))
    assert re.search(r"note: .*HPC_DET_NUMBER", note)


def test_a_container_that_does_not_start_is_not_blamed_on_the_hook(gang: Gang, runtime: Runtime) -> None:
    hooked(gang, "true", **settings(runtime, args=("--no-such-flag",)))
    assert run(gang, PATH=runtime.path) == [1]
    assert not failure(gang).startup_hook
    assert "--no-such-flag" in gang.printed.read_text()


# --- launchers that start the ranks of several nodes


WRITES_OWN = """
import os
with open("own-" + os.environ["RANK"], "w") as file:
    file.write(os.environ["OWN"] + " " + os.environ.get("ONLY", "none"))
"""
OWN = 'export OWN=$HPC_DET_NODE_RANK; [ $HPC_DET_NODE_RANK = 1 ] || export ONLY="node 0"'


def own(gang: Gang) -> list[str]:
    """Return what each rank of two nodes has seen."""
    return [(gang.code / f"own-{rank}").read_text() for rank in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torch_distributed"])
def test_ranks_of_each_node_see_its_own_exports_under_launchers_of_others(gang: Gang, launcher: str) -> None:
    (gang.code / "train.py").write_text(WRITES_OWN)
    hooked(gang, OWN, f"exec $PYTHON -m hpc_det.launch.{launcher} train.py", **TWO)
    assert run(gang, 2) == [0, 0], gang.printed.read_text()
    assert own(gang) == ["0 node 0", "1 none"]


@pytest.mark.long
@pytest.mark.parametrize("vendor", ["mpich", "open_mpi"])
def test_ranks_of_each_node_see_its_own_exports_under_one_mpirun(gang: Gang, vendor: str) -> None:
    (gang.code / "train.py").write_text(f"from mpi4py import MPI\n{WRITES_OWN}")
    mpirun = mpiruns.mpirun(vendor)
    # For Open MPI's shared memory, two "nodes" with the same host name are one node.
    flags = "--mca btl self,tcp -- " if "openmpi" in mpirun else ""
    words = f"exec $PYTHON -m hpc_det.launch.mpi {flags}train.py"
    hooked(gang, OWN, words, mpi_launcher=(mpirun,), **TWO)
    assert run(gang, 2) == [0, 0], gang.printed.read_text()
    assert own(gang) == ["0 node 0", "1 none"]
