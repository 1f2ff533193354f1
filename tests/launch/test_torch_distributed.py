from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.launch.launchers.arguments import Launch
from hpc_det.launch.torch_distributed import torchrun_command
from hpc_det.node.network import free_port
from hpc_det.store.attempt import first_failure
from tests.facts import unnamed
from tests.launch.gang import Gang
from tests.store.test_attempt import ATTEMPT
from tests.wait import DEADLINE_S

MODULE = [sys.executable, "-m", "hpc_det.launch.torch_distributed"]


def test_torchrun_is_told_the_gangs_shape_and_a_static_meeting_point() -> None:
    assert torchrun_command(Launch((), ("train.py", "--lr", "1")), ATTEMPT) == [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--node-rank=1",
        "--master-addr=10.0.0.7",
        "--master-port=15001",
        "--max-restarts=0",
        "--signals-to-handle=SIGQUIT",
        "train.py",
        "--lr",
        "1",
    ]


def test_overrides_come_after_our_flags_and_before_the_script() -> None:
    command = torchrun_command(Launch(("--max-restarts=2", "--tee=3"), ("train.py",)), ATTEMPT)
    assert command[-3:] == ["--max-restarts=2", "--tee=3", "train.py"]


@pytest.mark.parametrize(
    ("words", "for_python"),
    [("train.py a", True), ("-m package.train", True), ("python3 train.py", False), ("bash run.sh", False)],
)
def test_a_command_is_started_as_it_is_and_a_file_by_python(words: str, for_python: bool) -> None:
    command = tuple(words.split())
    started = torchrun_command(Launch((), command), ATTEMPT)
    assert started[-len(command) :] == list(command)
    assert ("--no-python" not in started) is for_python


@pytest.mark.integration
def test_a_gang_of_one_rank_needs_no_torchrun(gang: Gang) -> None:
    shows = "import os, sys; print(sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'], os.getppid())"
    (gang.code / "train.py").write_text(shows)
    launcher = "exec $PYTHON -m hpc_det.launch.torch_distributed train.py --lr 1"
    gang.plan(f"echo $$ >launcher; {launcher}", ranks_per_node=1)
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    pid = (gang.code / "launcher").read_text()
    assert gang.trial.rank_log(1, 0).read_text() == f"['--lr', '1'] 0 1 {pid}"


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MODULE, *arguments], capture_output=True, text=True, env=os.environ | env)


@pytest.mark.integration
def test_a_wrong_command_line_ends_with_the_usage_and_exit_code_2(tmp_path: Path) -> None:
    attempt = replace(ATTEMPT, folder=str(tmp_path))
    done = run("--trial", "m:C", "surplus", **attempt.to_env())
    assert (done.returncode, done.stdout) == (2, "")
    assert unnamed(done.stderr, "--trial m:C", "surplus") == []
    assert "Traceback" not in done.stderr
    noted = first_failure(attempt.trial, attempt.number)
    assert noted is not None
    assert noted.user_error
    assert unnamed(noted.message, "--trial m:C", "surplus") == []


@pytest.mark.integration
def test_a_launcher_without_an_agent_says_so() -> None:
    done = run("--trial", "m:C")
    assert done.returncode == 1
    assert unnamed(done.stderr, "node agent", "hpc-det experiment create") == []
    assert "Traceback" not in done.stderr


SHOW = """
import os
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RES_OPTIONS")
os.write(1, ("/".join(os.environ[name] for name in names) + "\\n").encode())  # at once, so that words do not mix
"""


@pytest.mark.integration
def test_the_real_torchrun_takes_our_flags_and_upstreams_overrides(gang: Gang) -> None:
    port = free_port()
    overrides = f"--rdzv_endpoint=127.0.0.1:{port} --no-python"
    (gang.code / "show.py").write_text(SHOW)
    gang.plan(f"exec $PYTHON -m hpc_det.launch.torch_distributed {overrides} -- $PYTHON show.py")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    expected = [f"{rank}/2/127.0.0.1/{port}/timeout:1 attempts:1" for rank in (0, 1)]
    assert sorted(gang.printed.read_text().splitlines()) == expected


FAILS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends the other rank with it
if os.environ["RANK"] == "1":
    raise ValueError("loss is nan")
time.sleep(60)
"""


@pytest.mark.integration
def test_a_failure_of_the_real_torchrun_names_the_rank_and_its_exception(gang: Gang) -> None:
    (gang.code / "train.py").write_text(FAILS)
    gang.plan("exec $PYTHON -m hpc_det.launch.torch_distributed train.py")
    assert gang.run_job()[0] == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert unnamed(failure.message, "exit code 1", "ValueError: loss is nan", "torchrun", "rank 1") == []
    assert "===" not in failure.message
