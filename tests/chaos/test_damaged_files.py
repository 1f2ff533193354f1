"""Each file of an experiment is damaged in many ways: every command names the file, continues with the other
experiments, and shows no wrong state.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.node.json_files import write_json
from hpc_det.store.attempt import request_stop
from hpc_det.view.summary import WITHOUT_FACTS
from tests.chaos.table import Amount, Tally
from tests.cli.conftest import Command, Result
from tests.cli.conftest import hpc_det as hpc_det
from tests.cli.conftest import life as life
from tests.cli.conftest import root as root
from tests.cli.conftest import scheduler as scheduler
from tests.cli.conftest import umask as umask
from tests.cli.life import FakeScheduler, Life
from tests.odd import damages
from tests.view.performance.profiles import sample, stretch

pytestmark = pytest.mark.integration

UUID = "1f0c2d3e-0000-4000-8000-000000000007"
LOOKS: list[tuple[str, ...]] = [
    *(("experiment", what, "1") for what in ("describe", "list-trials", "list-checkpoints", "logs", "config")),
    *(("trial", what, "1/1") for what in ("describe", "profile", "logs")),
    ("experiment", "list"),
    ("task", "list"),
    ("report", "1", "--json"),
    ("checkpoint", "describe", UUID),
]
ACTS: list[tuple[str, ...]] = [
    *(("experiment", what, "1") for what in ("pause", "cancel", "kill", "activate", "continue", "archive")),
    ("experiment", "delete", "1", "--yes"),
    ("experiment", "set", "name", "1", "x"),
    ("experiment", "set", "gc-policy", "1", "--yes", "--save-trial-latest", "0"),
    ("experiment", "label", "add", "1", "x"),
    ("experiment", "cleanup"),
]

REFUSED = (
    *("only a paused one can be", "has not ended", "is RUNNING", "is not a folder"),  # also without any damage
    "of the search rules, but",  # of a newer version
    "experiments/1 are damaged",  # values that no reader foresees: the file is not known
)
"""Parts of permitted messages, beside the name of the damaged file."""


MORE_MEMORY = 2**32


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Limit the memory, so that a command that takes a damaged number for an amount fails, and not the whole
    machine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if hard in range(has + MORE_MEMORY):
        pytest.skip("this process may have little memory")
    resource.setrlimit(resource.RLIMIT_AS, (has + MORE_MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def whole(life: Life, scheduler: FakeScheduler, root: Path) -> Life:
    """Return experiment 1, which runs, with every file that the command line reads; beside it is experiment 2."""
    life.begins()
    life.trains_from(0)
    life.reports("training", 10, {"loss": 1.0}, samples_per_second=4.0)
    life.reports("validation", 10, {"accuracy": 0.5}, seconds=1.0)
    life.saves(10, uuid=UUID)
    life.rank_prints(0, "hello\n")
    stretch(life.trial)
    sample(life.trial, at=1)
    write_json(life.folder.origin, {"name": "config"})
    write_json(life.folder.storage, {})
    write_json(life.folder.about, {"name": "renamed", "labels": ["x"], "archived": False})
    write_json(life.folder.cluster, {"name": "lab", "scheduler": "slurm", "slots_per_node": 2, "slot_type": "cpu"})
    write_json(life.folder.git, {"commit": "a" * 40, "branch": None, "remote": None, "dirty": False})
    write_json(life.folder.next_jobs(1, 0), {"jobs": ["4712"]})
    write_json(life.trial.outcome, {"attempt": 1, "kind": "preempted", "steps": 10})
    life.trial.nodes(1).parent.mkdir(exist_ok=True)
    write_json(life.trial.nodes(1), ["node1"])
    request_stop(life.trial.stop, attempt=1, reason="resume check", source="ada")
    Life.submitted(root, job_id="5000", title="other").begins()
    return life


def files_of(life: Life) -> list[Path]:
    found = sorted(path for path in life.folder.path.rglob("*") if path.is_file())
    return [path for path in found if path.suffix in (".json", ".jsonl", ".yaml")]


def test_a_damaged_file_is_named_and_hides_no_other_experiment(
    whole: Life,
    scheduler: FakeScheduler,
    hpc_det: Command,
    root: Path,
    tmp_path: Path,
    amount: Amount,
    tally: Tally,
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(root, kept)
    trials = [(file, damage) for file in files_of(whole) for damage in damages(file.read_bytes())]
    for number, (file, damage) in enumerate(amount.of(trials, sample=40)):
        with tally.trying("commands over a damaged file"):
            file.write_bytes(damage)
            check_list(hpc_det("experiment", "list", "--all", "--json"), file, damage)
            look, act = LOOKS[number % len(LOOKS)], ACTS[number % len(ACTS)]
            check(hpc_det(*look), look, file, damage)
            result = hpc_det(*act)
            check(result, act, file, damage)
            check_done(result, act, scheduler, file, damage)
            assert contents(root / "experiments" / "2") == contents(kept / "experiments" / "2")
        scheduler.cancelled.clear()
        shutil.rmtree(root)
        shutil.copytree(kept, root)


def check_list(result: Result, file: Path, damage: bytes) -> None:
    assert result.code == 0, (file, damage, result.err)
    one, other = json.loads(result.out)
    assert (other["name"], other["state"]) == ("other", "RUNNING")
    assert one["name"] in WITHOUT_FACTS or one["state"] == "RUNNING", (file, damage, one)


def check(result: Result, command: tuple[str, ...], file: Path, damage: bytes) -> None:
    """Check that the command succeeded, or was refused: either for the damage, naming the file, or as without any
    damage.
    """
    is_refused = any(words in result.err for words in (file.name, *REFUSED))
    assert result.code == 0 or is_refused, (command, file, damage, result.err)


def check_done(result: Result, command: tuple[str, ...], scheduler: FakeScheduler, file: Path, damage: bytes) -> None:
    """Check that only jobs of experiment 1 are cancelled, and that they are if `kill` succeeded."""
    if result.code == 0 and command[1] == "kill":
        assert "4711" in scheduler.cancelled, (file, damage, result)
    assert set(scheduler.cancelled) <= {"4711", "4712"}, (command, file, damage)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
