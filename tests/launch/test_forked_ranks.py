"""Ranks that the launcher `direct` forks from itself, beside ranks that it executes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.rank_variables import NO_FORKS, PRELOAD
from hpc_det.launch.forked_ranks import modules_of
from hpc_det.launch.launchers.arguments import RANK
from hpc_det.store.attempt import first_failure
from tests.launch.gang import Gang
from tests.wait import DEADLINE_S

integration = pytest.mark.integration

SHOWS = """
import atexit, os, pickle, sys
import torch
print(os.getppid())
print(os.getsid(0) == os.getpid())
print(__name__, __file__, sys.argv, sys.path[0], os.environ["RANK"], sys.stdout.line_buffering)
class Own:
    pass
print(type(pickle.loads(pickle.dumps(Own()))) is Own)
atexit.register(print, "at exit")
"""
TRAINS = """
import random
import numpy, torch
from torch.utils.data import DataLoader
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(256, 64)
for batch in DataLoader(data, batch_size=32, shuffle=True, num_workers=1):
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
numpy.random.seed(1)
print((numpy.random.rand(300, 300) @ numpy.random.rand(300, 300)).sum().hex(), torch.get_num_threads())
"""


def run(
    gang: Gang,
    text: str,
    *arguments: str,
    ranks: int = 2,
    forked: bool = True,
    through: Sequence[str] = (),
    **changes: Any,
) -> list[list[str]]:
    """Run the script as a gang of one node, and return the lines of each rank's log.

    `through`: a command that executes the agent.
    """
    (gang.code / "train.py").write_text(text)
    command = [sys.executable, "-m", "hpc_det.launch.direct", "train.py", *arguments]
    gang.plan(command, ranks_per_node=ranks, nursery=forked, **changes)
    gang.start_agent(through=through).wait(timeout=DEADLINE_S)
    logs = [gang.trial.rank_log(1, rank) for rank in range(ranks)]
    lines = [log.read_text().splitlines() for log in logs]
    for log in logs:
        log.unlink()
    return lines


@pytest.mark.parametrize(
    ("text", "is_forked"),
    [
        ("import torch\n", True),
        ("    from torch import nn\n", True),
        ("import hpc_det.core\n", True),
        ("import lightning as L\n", True),
        ("import os, torch\n", True),
        ("import torchlike\n", False),
        ("import jax\n", False),
        ("# import torch\n", False),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n", False),
        ('import os\nos.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "x")\nimport torch\n', False),
        ("import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nimport torch\n", True),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\nimport torch\n", True),
    ],
)
def test_a_script_is_forked_if_it_imports_torch_and_sets_nothing_that_torch_reads_at_its_import(
    text: str, is_forked: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert bool(modules_of(["train.py", "--lr", "1"], tmp_path, {})) is is_forked


@pytest.mark.parametrize("command", [["-m", "train"], ["sh", "-c", "true"], ["missing.py"]])
def test_other_commands_are_executed(command: list[str], tmp_path: Path) -> None:
    assert modules_of(command, tmp_path, {}) == ()


@pytest.mark.parametrize("file", ["model_def.py", "model_def/__init__.py"])
def test_a_trial_class_is_forked_unless_its_module_sets_what_torch_reads_at_its_import(
    file: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("import torch\n")
    command = ["-m", RANK, "model_def:Trial"]
    assert modules_of(command, tmp_path, {}) != ()
    assert modules_of(command, tmp_path, {PRELOAD: NO_FORKS}) == ()
    (tmp_path / file).write_text("import os\nos.environ['MKL_NUM_THREADS'] = '1'\nimport torch\n")
    assert modules_of(command, tmp_path, {}) == ()


@integration
def test_a_forked_script_runs_as_python_would_run_it(gang: Gang) -> None:
    forked, executed = (run(gang, SHOWS, "--lr", "1", forked=each) for each in (True, False))
    assert (forked[0][1], *forked[0][3:]) == ("True", "True", "at exit")
    assert [lines[1:] for lines in forked] == [lines[1:] for lines in executed]


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("import settings", "settings.py"),
        ("import os, settings as s", "settings.py"),
        ("from lib.settings import x", "lib/settings.py"),
        ("from lib import settings", "lib/__init__.py"),
        ("from lib import a, settings as s", "lib/settings.py"),
        ("from . import settings", "settings.py"),
        ("from lib import (\n    settings,\n)", "lib/settings.py"),
        ("from .settings import x", "settings.py"),
        ("import middle", "settings.py"),
    ],
)
def test_files_that_the_script_or_trial_imports_count_as_well(line: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    (tmp_path / "middle.py").write_text("if True:\n    import middle, settings\n")
    (tmp_path / "lib").mkdir()
    commands = (["train.py"], ["-m", RANK, "train:Trial"])
    assert all(modules_of(command, tmp_path, {}) for command in commands)
    (tmp_path / file).write_text("import os\nos.environ['MKL_NUM_THREADS'] = '3'\n")
    assert not any(modules_of(command, tmp_path, {}) for command in commands)


@integration
def test_forked_and_executed_ranks_train_to_the_same_bits(gang: Gang) -> None:
    forked, executed = (run(gang, TRAINS, forked=each) for each in (True, False))
    assert forked == executed
    assert len(forked[0]) == 9


@integration
def test_ranks_are_forked_from_one_process(gang: Gang) -> None:
    shows = "import os, torch\nprint(os.getppid(), 'hpc_det.launch.direct' in open('/proc/self/cmdline').read())\n"
    lines = [lines[0].split() for lines in run(gang, shows, ranks=3)]
    assert len({parent for parent, _ in lines}) == 1
    assert {is_forked for _, is_forked in lines} == {"True"}


@integration
@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        pytest.param("raise SystemExit('no')", 1, "no", marks=pytest.mark.long),
        ("import sys; sys.exit(7)", 7, None),
        pytest.param("import os; os._exit(9)", 9, None, marks=pytest.mark.long),
        ("import os; os.kill(os.getpid(), 9)", -9, None),
    ],
)
def test_the_end_of_a_forked_script_is_that_of_an_executed_one(
    ending: str, code: int, last: str | None, gang: Gang
) -> None:
    text = f"import torch\n{ending}\n"
    lines = run(gang, text, ranks=1)[0]
    found = first_failure(gang.trial, 1)
    assert found is not None
    assert found.code == code
    assert lines[-1:] == ([last] if last else [])
    if "ValueError" in ending:
        assert lines[:2] == [
            "Traceback (most recent call last):",
            f'  File "{gang.code}/train.py", line 2, in <module>',
        ]
    assert run(gang, text, ranks=1, forked=False)[0] == lines


@integration
def test_ranks_are_executed_where_the_imports_have_started_a_thread(gang: Gang) -> None:
    starts = "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\n"
    (gang.code / "torch").mkdir()
    (gang.code / "torch" / "__init__.py").write_text(starts)
    (gang.code / "torch" / "_dynamo.py").touch()
    shows = "import os, torch\nprint('train.py' in open('/proc/self/cmdline').read())\n"
    assert {lines[0] for lines in run(gang, shows)} == {"True"}
    assert "threads" in gang.printed.read_text()


@integration
def test_modules_of_the_plan_are_imported_before_the_fork(gang: Gang) -> None:
    (gang.code / "mine.py").write_text("import os\nprocess = os.getpid()\n")
    shows = "import os, torch, sys\nprint(sys.modules['mine'].process, sys.modules['mine'].process != os.getpid())\n"
    first, second = run(gang, shows, preload=("mine",))
    assert first == second
    assert first[0].endswith("True")


@integration
def test_a_module_that_cannot_be_imported_is_noted_and_the_ranks_are_executed(gang: Gang) -> None:
    shows = "import os, torch\nprint('train.py' in open('/proc/self/cmdline').read())\n"
    assert {lines[0] for lines in run(gang, shows, preload=("missing_module",))} == {"True"}
    assert "missing_module" in gang.printed.read_text()


CPUS = sorted(os.sched_getaffinity(0))
SHOWS_CPUS = "import os\nprint(sorted(os.sched_getaffinity(0)), flush=True)\nos._exit(0)\nimport torch\n"
ONE_CPU = ["taskset", "-c", str(CPUS[-1])]


@integration
@pytest.mark.skipif(len(CPUS) < 2, reason="a machine with one CPU")
@pytest.mark.parametrize(
    ("variable", "through"),
    [
        pytest.param("OMP_PROC_BIND=true", [], marks=pytest.mark.long),
        ("OMP_PLACES=cores", []),
        pytest.param(f"GOMP_CPU_AFFINITY={CPUS[0]}", ONE_CPU, marks=pytest.mark.long),
    ],
)
def test_forked_ranks_start_with_the_cpus_of_their_agent_as_executed_ones_do(
    gang: Gang, variable: str, through: list[str]
) -> None:
    forked, executed = (
        run(gang, SHOWS_CPUS, forked=each, through=through, environment=[variable]) for each in (True, False)
    )
    assert forked == executed == [[str(CPUS[-1:] if through else CPUS)]] * 2


@integration
@pytest.mark.skipif(len(CPUS) < 2, reason="a machine with one CPU")
def test_a_preloaded_module_that_binds_its_process_does_not_bind_the_ranks(gang: Gang) -> None:
    (gang.code / "binds.py").write_text("import os\nos.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n")
    assert run(gang, SHOWS_CPUS, preload=("binds",)) == [[str(CPUS)]] * 2
