"""Scenarios to disturb. Each runs in a folder, reports to `say` what is durable from then on, and reads what
remains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint import async_save, snapshots
from hpc_det.checkpoint.checkpoints import CheckpointContext, Put
from hpc_det.checkpoint.committed import CODE, newest_good
from hpc_det.checkpoint.content import load
from hpc_det.checkpoint.node_folders import SMALL_FILES, rank_file, shard_file
from hpc_det.checkpoint.rank_files import unpacked
from hpc_det.core.portable import keep_code
from hpc_det.distributed.collectives import Distributed
from hpc_det.node.files import write_first
from hpc_det.node.json_files import append_line, read_json, read_lines, write_json
from hpc_det.node.key import KEY_BYTES, user_key
from hpc_det.pytorch.loop.run import portable_of
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.search.journal import SearchJournal
from hpc_det.sgd.rank.state import read_state, write_state
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.journal import Journal
from hpc_det.store.run_folder import RunFolder
from hpc_det.sweep.files import SweepFiles
from tests.chaos.gangs import on_forked_ranks
from tests.pytorch.trials import CONFIG, Tiny
from tests.search.experiments import experiment

Say = Callable[[Any], None]


@dataclass(frozen=True)
class Scenario:
    what: str
    """The row of the table."""
    play: Callable[[Path, Say], None]
    found: Callable[[Path], list[Any]]
    """Return what a reader finds, oldest first. Raises if anything is incomplete."""
    appends: bool = False
    """Everything that was reported stays, not only the last value."""
    prepare: Callable[[Path], object] = lambda folder: None
    """Prepares the folder, undisturbed."""


# --- checkpoints


def save_three(folder: Path, say: Say, save: Callable[[CheckpointContext, int], object], rank: Distributed) -> None:
    """Save three checkpoints, of which the newest is kept; report the batches of each when it is committed."""
    checkpoints = CheckpointContext(folder / "checkpoints", rank)
    found = checkpoints.newest()
    for steps in range((found[1] if found else 0) + 10, (found[1] if found else 0) + 40, 10):
        save(checkpoints, steps)
        if rank.is_chief:
            say(steps)
            checkpoints.prune({}, best=0, latest=1, smaller_is_better=True)


def files_at(steps: int, name: str = "state.pth") -> dict[str, Any]:
    return {name: {"weights": torch.full((1500,), float(steps)), "steps": steps}}


def saves(folder: Path, say: Say) -> None:
    save_three(folder, say, lambda checkpoints, steps: checkpoints.save(steps, files_at(steps)), Distributed())


def saves_behind(folder: Path, say: Say) -> None:
    def save(checkpoints: CheckpointContext, steps: int) -> None:
        checkpoints.begin(steps, files_at(steps))
        checkpoints.settled(wait=True)

    save_three(folder, say, save, Distributed())


def saves_of_ranks(folder: Path, say: Say) -> None:
    """Save with two ranks, each of which writes a file."""

    def rank(distributed: Distributed) -> None:
        own = f"rank-{distributed.rank}.pth"
        save_three(folder, say, lambda checkpoints, steps: checkpoints.save(steps, files_at(steps, own)), distributed)

    on_forked_ranks(2, rank)


def saves_of_nodes(folder: Path, say: Say) -> None:
    """Save with two nodes of two ranks, each of which has a small file, and a large one that it writes itself."""
    async_save.SMALL_BYTES = 10_000  # type: ignore[attr-defined]

    def rank(distributed: Distributed) -> None:
        number = distributed.rank

        def save(checkpoints: CheckpointContext, steps: int) -> None:
            files = files_at(steps, rank_file(number))
            files[shard_file(number)] = {"weights": torch.full((9000,), float(steps)), "steps": steps}
            checkpoints.begin(steps, files | (files_at(steps) if distributed.is_chief else {}))
            checkpoints.settled(wait=True)

        save_three(folder, say, save, distributed)

    on_forked_ranks(4, rank, nodes=2)


def saves_of_engines(folder: Path, say: Say) -> None:
    """Save as DeepSpeed's engines do: some files by `put`, some written by other code, and the trial's code."""
    spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 5, "hparams": {}, "config": CONFIG}
    portable = portable_of(spec, Tiny, folder / "code", is_trainer=False)

    def save(checkpoints: CheckpointContext, steps: int) -> None:
        def write(partial: Path, put: Put) -> None:
            (partial / "engine").mkdir()
            torch.save(files_at(steps)["state.pth"], partial / "engine" / "weights.pth")
            put("engine/optimizer.pth", files_at(steps)["state.pth"])

        def finish(partial: Path) -> Any:
            return portable.write(partial, steps)

        checkpoints.begin(steps, files_at(steps), finish, write=write)
        checkpoints.settled(wait=True)

    save_three(folder, say, save, Distributed())


def write_code(folder: Path) -> None:
    """Copy the code as an attempt does before the trial's first batch."""
    (folder / "code" / "library").mkdir(parents=True)
    (folder / "code" / "model_def.py").write_text("A = 1\n")
    (folder / "code" / "library" / "part.py").write_text("B = 2\n")
    keep_code(folder / "code")


def checkpoints_in(folder: Path) -> list[Any]:
    """Return the batches of the newest checkpoint, if any; all of its files must be of that batch."""
    newest, skipped = newest_good(folder / "checkpoints")
    assert skipped == []
    if newest is None:
        return []
    assert newest.code_damage() == []
    contents = [load(newest.path / name) for name in newest.whole.files if name.endswith(".pth")]
    for name in newest.whole.files:
        if name.endswith(SMALL_FILES):
            contents += [load(BytesIO(file)) for file in unpacked((newest.path / name).read_bytes()).values()]
    assert len(contents) == 9 if newest.nodes else contents
    assert {each["steps"] for each in contents} == {newest.steps}
    assert all(each["weights"].eq(newest.steps).all() for each in contents)
    return [newest.steps]


def code_checkpoints_in(folder: Path) -> list[Any]:
    newest, _ = newest_good(folder / "checkpoints")
    assert newest is None or set(newest.code) == {f"{CODE}/model_def.py", f"{CODE}/library/part.py"}
    return checkpoints_in(folder)


# --- TorchTrainer


def takes_snapshots(folder: Path, say: Say) -> None:
    """Take snapshots as a node agent and the driver do; report the calls that are in each."""
    run = RunFolder(folder / "run")
    run.make()
    first = snapshots.last_number(run) + 1
    for calls in range(first, first + 3):
        partial = snapshots.begin(run, calls)
        sealed = partial.write(memoryview(b"%9d" % calls * 500))
        partial.commit(sealed, [b"%9d" % calls, b""], epochs_done=calls, calls=calls)
        say(calls)


def snapshots_in(folder: Path) -> list[Any]:
    run = RunFolder(folder / "run")
    if (newest := snapshots.newest(run)) is None:
        assert snapshots.last_number(run) == 0
        return []
    assert newest.number == newest.calls == snapshots.last_number(run), "none was skipped"
    assert newest.state.read_bytes() == b"%9d" % newest.calls * 500
    assert newest.own == [b"%9d" % newest.calls, b""]
    return [newest.calls]


def saves_state(folder: Path, say: Say) -> None:
    """Call TorchTrainer.save several times with the same file."""
    before = state_in(folder)
    first = before[0] + 1 if before else 1
    for number in range(first, first + 3):
        write_state(files_at(number)["state.pth"], folder / "trained.pth")
        say(number)


def state_in(folder: Path) -> list[Any]:
    if not (folder / "trained.pth").exists():
        return []
    state = read_state(folder / "trained.pth", weights_only=True)
    assert state["weights"].eq(state["steps"]).all()
    return [state["steps"]]


# --- journals


def journal(folder: Path, say: Say) -> None:
    """Write two attempts; report each event that is written."""
    trial = Journal(folder / "journal.jsonl")
    first = trial.last_attempt() + 1
    for attempt in (first, first + 1):
        trial.started(attempt, str(attempt))
        say(["started", attempt])
        end = AttemptEnd(cause=Cause.PREEMPTED, steps=10 * attempt)
        trial.ended(attempt, end, Decision(Action.REQUEUE, "preempted"), None)
        say(["ended", attempt])


def journal_in(folder: Path) -> list[Any]:
    return [[event["event"], event["attempt"]] for event in Journal(folder / "journal.jsonl").events()]


def lines(folder: Path, say: Say) -> None:
    """Append lines, each of which is durable."""
    for number in range(4):
        append_line(folder / "metrics.jsonl", {"number": number, "text": "ä" * 50})
        say(number)


def lines_in(folder: Path) -> list[Any]:
    return [line["number"] for line in read_lines(folder / "metrics.jsonl")]


def search(folder: Path, say: Say) -> None:
    """Let a worker of a random search ask, train and report; report the number of entries."""
    shared = SearchJournal(ExperimentFolder(folder / "search"))
    for worker in (1, 2):
        if work := shared.ask(worker, "4711"):
            say(len(entries_in(folder)))
            shared.report(worker, work, 0.5)
            say(len(entries_in(folder)))
        shared.lose(worker, "4711")
        say(len(entries_in(folder)))


def begin_search(folder: Path) -> None:
    found = experiment(folder / "search", name="random", max_trials=50, max_length={"batches": 9})
    SearchJournal(found).submitted(1, 2, stay=True)


def entries_in(folder: Path) -> list[Any]:
    """Return the numbers of the entries, each of which is complete."""
    journal = SearchJournal(ExperimentFolder(folder / "search"))
    return [*range(1, len([*journal.new()]) + 1)]


# --- small files


def replaces(folder: Path, say: Say) -> None:
    """Replace one file several times."""
    for number in range(4):
        write_json(folder / "trial.json", {"number": number, "text": "ä" * 50})
        say(number)


def replaced_in(folder: Path) -> list[Any]:
    content = read_json(folder / "trial.json")
    return [content["number"]] if content else []


def sweep(folder: Path, say: Say) -> None:
    """Write the return value of a sweep's point several times, sealed with the user's key."""
    files = SweepFiles(ExperimentStore(folder / "root").folder(1))
    for number in range(3):
        files.write(files.returned(1), b"%d" % number * 3000)
        say(number)


def begin_sweep(folder: Path) -> None:
    SweepFiles(ExperimentStore(folder / "root").folder(1)).returned(1).parent.mkdir(parents=True)


def returned_in(folder: Path) -> list[Any]:
    key = folder / "root" / "key"
    assert not key.exists() or len(user_key(key)) == KEY_BYTES
    files = SweepFiles(ExperimentStore(folder / "root").folder(1))
    if not files.returned(1).exists():
        return []
    content = files.read(files.returned(1))
    assert content == content[:1] * 3000
    return [int(content[:1])]


def claims(folder: Path, say: Say) -> None:
    """Write files that only one process can create; report each that exists."""
    made = len(claimed_in(folder))
    for number in range(made, made + 3):
        write_first(folder / f"{number}.claim", b"whole" * 500)
        say(number)


def claimed_in(folder: Path) -> list[Any]:
    found = sorted(folder.glob("*.claim"), key=lambda path: int(path.stem))
    assert all(path.read_bytes() == b"whole" * 500 for path in found)
    return [int(path.stem) for path in found]


CHECKPOINTS, TRAINER, JOURNALS, FILES = "checkpoints", "TorchTrainer's snapshots", "journals", "small files"

SCENARIOS = {
    "saves": Scenario(CHECKPOINTS, saves, checkpoints_in),
    "saves_behind": Scenario(CHECKPOINTS, saves_behind, checkpoints_in),
    "saves_of_ranks": Scenario(CHECKPOINTS, saves_of_ranks, checkpoints_in),
    "saves_of_nodes": Scenario(CHECKPOINTS, saves_of_nodes, checkpoints_in),
    "saves_of_engines": Scenario(CHECKPOINTS, saves_of_engines, code_checkpoints_in, prepare=write_code),
    "snapshots": Scenario(TRAINER, takes_snapshots, snapshots_in),
    "state": Scenario(TRAINER, saves_state, state_in),
    "journal": Scenario(JOURNALS, journal, journal_in, appends=True),
    "lines": Scenario(JOURNALS, lines, lines_in, appends=True),
    "search": Scenario(JOURNALS, search, entries_in, appends=True, prepare=begin_search),
    "replaced": Scenario(FILES, replaces, replaced_in),
    "sweep": Scenario(FILES, sweep, returned_in, prepare=begin_sweep),
    "claims": Scenario(FILES, claims, claimed_in, appends=True),
}


def play(folder: Path, say: Say, scenario: str) -> None:
    """Run a scenario in the zygote."""
    SCENARIOS[scenario].play(folder, say)
