"""The files of a search, and who writes each. The run folder is an experiment's as far as its search goes.

RUN/effective.json      searcher, hyperparameters, seed        tune_run, once
    search/             the search's journal                   the driver
    driver.json         the process that drives it             "
    key                 what the next two are sealed with      "
    trainable.pkl       the class, and what JSON has not       "
    import_path         where its modules are found            "
    trials/1/trial.json its hyperparameters and how it stands  "
             turn.json  what its process shall do now          "
             start/2/   the checkpoint that turn 2 begins with "
             metrics.jsonl  a line for each iteration          the trial's process
             checkpoints/   a folder each, committed by rename "
             outcome.json   what went wrong                    "
             logs/trial.log what it prints                     "
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpc_det.errors import UsageError
from hpc_det.node.files import make_private
from hpc_det.node.json_files import newest_first, parse_line, read_counted, read_json, write_json
from hpc_det.node.key import derived, read_with_seal, user_key, write_with_seal
from hpc_det.node.process import is_running, start_ticks
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.run_folder import path_of

Mode = Literal["min", "max"]
ITERATION, DONE = "training_iteration", "done"
"""In every result."""
STATE = "trial.json"
"""In a checkpoint: {"turn", "result", "data"}."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a trial's process shall do now."""

    number: int
    """From 1; a new one has a greater number."""
    process: int
    """Which of the trial's processes shall do it, from 1: one that was believed dead writes nothing any more."""
    until: int | None
    """Iterations behind it at the end of the turn; None: until it is done."""
    config: dict[str, Any]
    load: str | None = None
    """Another trial's checkpoint to begin the turn with; None: the trial's own latest."""
    stop: dict[str, float] = field(default_factory=dict)
    """The trial is done when a metric is as great as that, or greater."""
    checkpoint_freq: int = 1
    keep: dict[str, Any] = field(default_factory=dict)
    """Of the checkpoints, besides the newest: {"metric", "mode"} of the best."""


class TuneTrial(TrialFolder):
    @property
    def turn(self) -> Path:
        return self.path / "turn.json"

    def start(self, turn: int) -> Path:
        """The checkpoint of another trial, with which the turn begins."""
        return self.path / "start" / str(turn)

    @property
    def log(self) -> Path:
        return self.logs / "trial.log"

    def read_turn(self) -> Turn | None:
        """None: there is none, or the process shall end."""
        found = read_json(self.turn)
        return Turn(**found) if found else None

    def write_turn(self, turn: Turn | None) -> None:
        write_json(self.turn, asdict(turn) if turn else {})

    def newest(self) -> dict[str, Any] | None:
        """Return the last result, read from the end of the file: the driver asks many times a second."""
        return next(filter(None, map(parse_line, newest_first(self.metrics))), None)

    def results(self) -> list[dict[str, Any]]:
        """Of each iteration the last line: a process that died may have trained some that had to be trained again."""
        return read_counted(self.metrics, ITERATION)


class TuneFolder(ExperimentFolder):
    """A search's run folder."""

    @property
    def driver(self) -> Path:
        return self.path / "driver.json"

    @property
    def trainable(self) -> Path:
        return self.path / "trainable.pkl"

    @property
    def import_path(self) -> Path:
        return self.path / "import_path"

    def trial(self, number: int = 1) -> TuneTrial:
        return TuneTrial(self.path / "trials" / str(number))

    def key(self) -> bytes:
        return derived(user_key(self.path / "key"), "trainable")

    def prepare(self, config: Mapping[str, Any]) -> bool:
        """Make the folder for this search; whether it had begun before. UsageError where that was another search."""
        make_private(self.path)
        for folder in (self.search, self.path / "trials"):
            folder.mkdir(mode=0o700, exist_ok=True)
        before, now = read_json(self.effective), json.loads(json.dumps(config))
        if before is not None and before != now:
            raise UsageError(_differences(self.path, before, now))
        if before is None:
            write_json(self.effective, now)
        return before is not None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """This process drives the search. UsageError where another one of this machine does."""
        other = read_json(self.driver)
        host = os.uname().nodename
        if other and other["host"] == host and is_running(other["pid"], other["ticks"]):
            raise UsageError(f"{self.path}: process {other['pid']} drives this search now; wait for it, or end it")
        write_json(self.driver, {"host": host, "pid": os.getpid(), "ticks": start_ticks(os.getpid())})
        try:
            yield
        finally:
            self.driver.unlink(missing_ok=True)

    def write_trainable(self, content: Any) -> None:
        """For the processes of trials, which may be on other machines."""
        import cloudpickle

        try:
            pickled: bytes = cloudpickle.dumps(content)
        except Exception as error:
            raise UsageError(
                f"trainable: cannot be sent to the processes of trials: {type(error).__name__}: {error}; keep what "
                f"cannot be pickled out of the globals that it uses"
            ) from None
        key = self.key()
        write_with_seal(self.trainable, pickled, key)
        write_with_seal(self.import_path, json.dumps([os.path.abspath(folder) for folder in sys.path]).encode(), key)

    def read_trainable(self) -> Any:
        """What `write_trainable` was given, with its modules found where they were found there."""
        import cloudpickle

        folders = json.loads(read_with_seal(self.import_path, self.key()))
        sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
        return cloudpickle.loads(read_with_seal(self.trainable, self.key()))


def run_folder(run: str | os.PathLike[str], env: Mapping[str, str]) -> TuneFolder:
    return TuneFolder(path_of(run, env))


def _differences(run: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a search that is to go on was asked for otherwise the first time."""
    return [
        f"{run}: {section} is {json.dumps(now[section])}, and was {json.dumps(before.get(section))} when this search "
        f"began; ask for the same, or give another run"
        for section in now
        if now[section] != before.get(section)
    ]


def checkpoint_data(checkpoint: Path) -> str:
    """What load_checkpoint takes."""
    return str(os.path.normpath(checkpoint / (read_json(checkpoint / STATE) or {}).get("data", ".")))
