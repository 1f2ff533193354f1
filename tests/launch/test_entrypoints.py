"""Every form of an entrypoint that users write: launchers in tools, tools in launchers, lists, shell text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_det
from hpc_det.config.entrypoint import LAUNCHERS
from hpc_det.plan.planner import _argv
from hpc_det.store.attempt import first_failure
from tests.facts import unnamed
from tests.launch.gang import Gang
from tests.stub import Stub
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

TOOL = 'while [[ $1 != @(python3|numactl) ]]; do shift; done; exec "$@"'
"""Takes flags and then a command, like dlprof and numactl."""
SHOWS = "import os, sys; print(os.environ.get('RANK'), *sys.argv[1:])"


@pytest.fixture(autouse=True)
def job_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folder of this Python first on PATH, as a job's script does."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("python3 train.py --lr 1", "None --lr 1"),
        (["python3", "train.py", "$HOME; x"], "None $HOME; x"),
        ("cd . && LR=1 && python3 train.py --lr $LR", "None --lr 1"),
        ("python3 -m hpc_det.launch.direct train.py --lr 1", "0 --lr 1"),
        ("python3 -m hpc_det.launch.direct train.py -- --lr 1", "0 -- --lr 1"),
        ("python3 -m hpc_det.launch.direct -- python3 train.py -- --lr 1", "0 -- --lr 1"),
        ("python3 -m hpc_det.launch.torch_distributed python3 train.py --trial x", "0 --trial x"),
        (["python3", "-m", "determined.launch.torch_distributed", "train.py", "a b"], "0 a b"),
        ("dlprof --mode=simple python3 -m determined.launch.autohorovod train.py", "0"),
        ("numactl --interleave=all python3 -m hpc_det.launch.direct train.py", "0"),
        ("bash -c 'dlprof --mode=simple numactl -N 0 python3 -m hpc_det.launch.direct train.py'", "0"),
        ("python3 -m hpc_det.launch.direct numactl -N 0 python3 train.py 1", "0 1"),
        ("python3 -m hpc_det.launch.direct python3 -m hpc_det.launch.wrap_rank RANK python3 train.py", "[rank=0] 0"),
    ],
)
def test_what_the_entrypoint_says_is_started(gang: Gang, stub: Stub, entrypoint: str | list[str], said: str) -> None:
    for tool in ("dlprof", "numactl"):
        stub(tool, TOOL)
    (gang.code / "train.py").write_text(SHOWS)
    gang.plan(_argv(entrypoint, "python3"), ranks_per_node=1, environment=("HPC_DET_COMPAT=determined",))
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    own_log = gang.trial.rank_log(1, 0)
    assert (own_log if own_log.exists() else gang.printed).read_text().strip() == said


@pytest.mark.parametrize("launcher", [*LAUNCHERS, "wrap_rank"])
@pytest.mark.parametrize("start", ["hpc_det.launch", "hpc_det.compat -m determined.launch"])
def test_each_launcher_prints_its_usage_anywhere(tmp_path: Path, launcher: str, start: str) -> None:
    words = [sys.executable, "-m", *f"{start}.{launcher} -h".split()]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(Path(hpc_det.__file__).parents[1])}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python3 -m hpc_det.launch.{launcher} ")


@pytest.mark.parametrize("launcher", ["direct", "torch_distributed", "horovod", "autohorovod"])
def test_words_behind_a_trial_are_one_too_many(gang: Gang, launcher: str) -> None:
    gang.plan(["python3", "-m", f"hpc_det.launch.{launcher}", "--trial", "m:C", "s"])
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert failure.user_error
    assert unnamed(failure.message, "hpc_det.launch.", "--trial m:C", "s") == []
