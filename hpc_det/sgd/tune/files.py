"""The files of a search of `tune_run`, and the process that writes each. Names and formats are those of experiments.

RUN/effective.json      searcher, hyperparameters, seed        tune_run, once
    search/             the journal of the search              the driver
    driver.json         the process of the driver              "
    key                 the key that seals the next two files  "
    trainable.pkl       the class, and values JSON lacks       "
    import_path         the folders of its modules (sys.path)  "
    trials/1/trial.json its hyperparameters and its status     "
             turn.json  the current task of its process        "
             start/2/   the checkpoint that turn 2 starts from "
             metrics.jsonl  one line per iteration             the trial's process
             checkpoints/   one folder per checkpoint          "
             outcome.json   how the process ended              "
             logs/attempt-1/rank-0.log  its output             "
             journal.jsonl  its processes, as attempts         the driver

The experiment of the search (hpc_det.sgd.driver.experiment) has links to `search` and `trials`. A line of metrics.jsonl
is a validation of an experiment whose number of batches is the iteration; its key "result" has the whole result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpc_det.config.merge import leaves
from hpc_det.errors import UsageError, shown
from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import (
    append_line,
    json_lines,
    newest_first,
    parse_line,
    read_json,
    read_lines,
    write_json,
)
from hpc_det.node.key import derived, read_with_seal, user_key, write_with_seal
from hpc_det.node.process import is_running, start_ticks
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import BEGINS, numbers_in
from hpc_det.store.run_folder import make_run_folders, path_of

Mode = Literal["min", "max"]
ITERATION, DONE = "training_iteration", "done"
"""Keys of every result: the number of the iteration from 1, and whether the trial is complete."""
_TIMES = (ITERATION, "time", "time_this_iter_s", "time_total_s")
"""Keys of results that are not metrics."""
MOST_DIFFERENCES = 10
"""Largest number of values that the error for another search names."""
_ABSENT = object()
STATE = "trial.json"
"""File in a checkpoint: {"turn": number, "result": the last result, "data": path for load_checkpoint}."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A task for the process of a trial: train up to a certain iteration."""

    number: int
    """Number of the turn, from 1."""
    process: int
    """Number of the trial's process that has to execute the turn, from 1. An earlier process that was wrongly believed
    dead therefore writes nothing.
    """
    until: int | None
    """Iteration at which the turn ends; None: when the trial is complete."""
    config: dict[str, Any]
    """Hyperparameters of the trial."""
    load: str | None = None
    """Checkpoint of another trial to start the turn from; None: the trial's own newest."""
    stop: dict[str, float] = field(default_factory=dict)
    """By metric, the value at or above which the trial is complete."""
    checkpoint_freq: int = 1
    """Iterations from one checkpoint to the next; 0: only the last iteration of the turn has one."""
    keep: dict[str, Any] = field(default_factory=dict)
    """{"metric": name or None, "mode": "min" or "max"}: by these the best checkpoint is kept besides the newest two."""


class TuneTrial(TrialFolder):
    """The folder of a trial of `tune_run`."""

    @property
    def turn(self) -> Path:
        """The file with the current turn."""
        return self.path / "turn.json"

    def start(self, turn: int) -> Path:
        """Return the folder for a copy of another trial's checkpoint, from which turn `turn` starts."""
        return self.path / "start" / str(turn)

    def read_turn(self) -> Turn | None:
        """Return the current turn; None if there is none, or if the process is to exit."""
        found = read_json(self.turn)
        return Turn(**found) if found else None

    def write_turn(self, turn: Turn | None) -> None:
        """Write the current turn; None asks the process to exit."""
        write_json(self.turn, asdict(turn) if turn else {})

    def newest(self) -> dict[str, Any] | None:
        """Return the result of the last iteration, or None."""
        # Read from the end of the file, because the driver calls this many times a second.
        lines = filter(None, (parse_line(line, self.metrics) for line in newest_first(self.metrics)))
        return next(filter(None, map(_result_in, lines)), None)

    def results(self) -> list[dict[str, Any]]:
        """Return the last result of each iteration."""
        # An iteration may have several lines: after the death of a process some iterations are trained again.
        found: list[dict[str, Any]] = []
        for result in filter(None, map(_result_in, read_lines(self.metrics))):
            while found and found[-1][ITERATION] >= result[ITERATION]:
                found.pop()
            found.append(result)
        return found

    def append(self, result: Mapping[str, Any], process: int, total: int | None) -> None:
        """Append a result of a process. `total`: iterations of the whole trial; None: not known."""
        append_line(self.metrics, _report_of(result, process, total))

    def append_begin(self, process: int, iteration: int) -> None:
        """Append that a process begins from the checkpoint of this iteration, so that later results are void."""
        begins = {"kind": BEGINS, "attempt": process, "trained": iteration, "validated": iteration}
        append_line(self.metrics, {**begins, "time": time.time()})

    def convert(self) -> None:
        """Rewrite the results of an earlier version, whose lines were the results themselves."""
        lines = read_lines(self.metrics)
        if any("kind" not in line for line in lines):
            reports = [line if "kind" in line else _report_of(line, 1, None) for line in lines]
            text = "".join(line + "\n" for line in json_lines(self.metrics, reports, is_begin=True))
            write_atomic(self.metrics, text, private=True)


def _report_of(result: Mapping[str, Any], process: int, total: int | None) -> dict[str, Any]:
    known = {"steps": result[ITERATION], "total": total, "metrics": numbers_in(result, but=_TIMES)}
    return {"kind": "validation", **known, "attempt": process, "time": result["time"], "result": result}


def _result_in(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result in a line of metrics.jsonl, which is the result itself in runs of an earlier version."""
    if line.get("kind") == BEGINS:
        return None
    result: dict[str, Any] = line["result"] if "kind" in line else line
    return result


class TuneFolder(ExperimentFolder):
    """The run folder of a search."""

    @property
    def driver(self) -> Path:
        """The file that names the process of the driver."""
        return self.path / "driver.json"

    @property
    def trainable(self) -> Path:
        """The file with the pickled class."""
        return self.path / "trainable.pkl"

    @property
    def import_path(self) -> Path:
        """The file with the driver's sys.path."""
        return self.path / "import_path"

    def trial(self, number: int = 1) -> TuneTrial:
        """Return the folder of a trial."""
        return TuneTrial(self.path / "trials" / str(number))

    def key(self) -> bytes:
        """Return the key that seals the files to be unpickled."""
        return derived(user_key(self.path / "key"), "trainable")

    def prepare(self, config: Mapping[str, Any]) -> bool:
        """Create the folder for a search, or check that it belongs to the same search; return whether it existed.

        Raises UsageError if it belongs to another search, or cannot be created.
        """
        make_run_folders(self.path, self.search, self.path / "trials")
        before, now = read_json(self.effective), json.loads(json.dumps(config))
        if before is not None and before != now:
            raise UsageError(_differences(self.path, before, now))
        if before is None:
            write_json(self.effective, now)
        return before is not None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Make this process the only driver of the search on this machine in the `with` block.

        Raises UsageError if another process of this machine is its driver. `insist_on_no_other_driver` finds
        those of other machines.
        """
        other = read_json(self.driver)
        host = os.uname().nodename
        if other and other["host"] == host and is_running(other["pid"], other["ticks"]):
            raise UsageError(f"{self.path}: process {other['pid']} is running this search; wait for its end, or end it")
        write_json(self.driver, {"host": host, "pid": os.getpid(), "ticks": start_ticks(os.getpid())})
        try:
            yield
        finally:
            self.driver.unlink(missing_ok=True)

    def write_trainable(self, content: Any) -> None:
        """Write the pickled class and the driver's sys.path, for the processes of trials.

        Raises UsageError if `content` cannot be pickled.
        """
        import cloudpickle

        try:
            pickled: bytes = cloudpickle.dumps(content)
        except Exception as error:
            raise UsageError(
                f"trainable: it cannot be pickled for the processes of trials: {type(error).__name__}: {error}; remove "
                f"objects that cannot be pickled from the globals that it uses"
            ) from None
        key = self.key()
        write_with_seal(self.trainable, pickled, key)
        write_with_seal(self.import_path, json.dumps([os.path.abspath(folder) for folder in sys.path]).encode(), key)

    def read_trainable(self) -> Any:
        """Return what was given to `write_trainable`, after putting the driver's sys.path first in this process."""
        import cloudpickle

        # Pickles refer to modules by name, so the modules must be found in the folders in which the driver found them.
        folders = json.loads(read_with_seal(self.import_path, self.key()))
        sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
        return cloudpickle.loads(read_with_seal(self.trainable, self.key()))


def run_folder(run: str | os.PathLike[str], env: Mapping[str, str]) -> TuneFolder:
    """Return the run folder for a name below $HPC_DET_ROOT/sgd, or a path."""
    return TuneFolder(path_of(run, env))


def _differences(run: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a message for each value of the configuration that differs from the one the search began with."""
    was, is_now = dict(leaves(before)), dict(leaves(now))
    changed = [path for path in {**is_now, **was} if was.get(path, _ABSENT) != is_now.get(path, _ABSENT)]
    return [
        f"{run}: {path} is {_shown_at(path, is_now)}, but was {_shown_at(path, was)} when this search began; pass the "
        f"same arguments, or another run"
        for path in changed[:MOST_DIFFERENCES]
    ]


def _shown_at(path: str, values: Mapping[str, Any]) -> str:
    return shown(values[path]) if path in values else "not set"


def checkpoint_data(checkpoint: Path) -> str:
    """Return the path for `load_checkpoint` in a committed checkpoint."""
    return str(os.path.normpath(checkpoint / (read_json(checkpoint / STATE) or {}).get("data", ".")))


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts, with their keys joined by slashes."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
