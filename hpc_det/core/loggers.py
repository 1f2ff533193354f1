"""The loggers of a trial: copies of its metrics for W&B and MLflow, sent by rank 0.

Each logger has a thread that calls its library. Training puts reports into a bounded queue and never waits: a server
that is slow or does not answer costs reports, not time. An exception of the library is printed once and disables the
logger until the next attempt. The trial's metrics.jsonl has all metrics in any case.

The integration of each kind is `hpc_det.integrations.KIND`, which is imported by name, in the calling thread: a process
that is forked while another thread imports a package could wait forever for the same import.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from hpc_det.config.secrets import without_secrets
from hpc_det.distributed.metrics import scalar
from hpc_det.errors import pip_install, visible
from hpc_det.node.files import make_folders
from hpc_det.node.json_files import append_line, read_lines
from hpc_det.store.folders import TrialFolder

QUEUE_CALLS = 10_000
"""Calls that wait for a slow library; further reports are dropped."""
END_WAIT_S = 5.0
"""Longest wait, in seconds, for all loggers of a rank to send the rest when training ends."""
OFFLINE_WAIT_S = 60.0
"""The same for loggers that write to local files: they do end, but MLflow takes seconds to create its database."""
ENDS = ("finished", "stopped", "waiting", "failed")


class Logger(Protocol):
    """A kind of logger. One thread makes all calls, and any of them may raise an exception or take long."""

    is_offline: bool
    """Whether this attempt is written to local files. `begin` may set it, before it writes."""

    def begin(self, steps: int) -> None:
        """Connect. Training begins at a checkpoint with `steps` batches; 0 without a checkpoint."""

    def report(self, group: str, steps: int, metrics: Mapping[str, float]) -> None:
        """Send metrics after `steps` batches. `group`: training, validation, or any other name."""

    def checkpoint(self, steps: int, path: str) -> None:
        """Record a committed checkpoint."""

    def end(self, kind: str) -> None:
        """Send the rest. `kind`: one of ENDS."""


@dataclass(frozen=True, kw_only=True)
class LoggedTrial:
    """The facts of an attempt that an integration needs."""

    folder: Path
    """Folder of the logger's own files, below the trial's folder; it exists."""
    experiment: int
    trial: int
    attempt: int
    name: str
    """Name of the experiment."""
    labels: Sequence[str]
    hyperparameters: Mapping[str, Any]
    reported: Mapping[str, int]
    """The most batches for which earlier attempts have sent a report, by group."""
    calls: int
    """Number of calls that earlier attempts have made."""
    say: Callable[[str], None]
    """Prints a message to the rank's log, without secrets."""


Call: TypeAlias = Callable[[Logger], None]


class Loggers:
    """The loggers of a trial on rank 0. Without loggers, and in forked processes, its methods do nothing."""

    def __init__(self, senders: Sequence[Sender] = ()) -> None:
        self._senders = [*senders]
        _all.add(self)

    @classmethod
    def of(
        cls,
        entries: Sequence[Mapping[str, Any]] | None,
        trial: TrialFolder,
        spec: Mapping[str, Any],
        attempt: int,
    ) -> Loggers:
        """Return the loggers of an attempt. `entries`: the key `loggers` of its configuration; `spec`: trial.json.

        A logger whose package is missing is left out, with a printed message.
        """
        found = [
            (kind, settings) for entry in entries or () for kind, settings in entry.items() if settings is not None
        ]
        senders = [_sender(kind, settings, trial, spec, attempt) for kind, settings in found]
        return cls([sender for sender in senders if sender])

    def begin(self, steps: int) -> None:
        """Start sending. Training begins at a checkpoint with `steps` batches; 0 without one.

        What earlier attempts have reported beyond it was lost and is trained again; each integration documents how it
        treats this.
        """
        for sender in self._senders:
            sender.start(lambda logger: logger.begin(steps), steps)

    def report(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Send the scalars in `metrics`, whose names are joined by / where maps are nested."""
        if self._senders and (numbers := scalars(metrics)):
            self._put("report", steps, lambda logger: logger.report(group, steps, numbers), group)

    def checkpoint(self, steps: int, path: Path) -> None:
        """Record a committed checkpoint."""
        self._put("checkpoint", steps, lambda logger: logger.checkpoint(steps, str(path)))

    def end(self, kind: str, deadline: float | None = None) -> None:
        """Send the rest, and wait for it at most END_WAIT_S seconds, or OFFLINE_WAIT_S. `kind`: one of ENDS.

        `deadline`: time, in seconds since the epoch, until which the caller can wait. Further calls do nothing.
        """
        began, left_s = time.monotonic(), math.inf if deadline is None else max(deadline - time.time(), 0)
        until, offline_until = (began + min(wait_s, left_s) for wait_s in (END_WAIT_S, OFFLINE_WAIT_S))
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.end(lambda logger: logger.end(kind))
        for sender in senders:
            sender.join(until, offline_until)

    def forget(self) -> None:
        """Remove all loggers, in a forked process: its copies have no threads."""
        self._senders = []

    def _put(self, name: str, steps: int, call: Call, group: str | None = None) -> None:
        for sender in self._senders:
            sender.put(name, steps, call, group)


_all: WeakSet[Loggers] = WeakSet()


def _forget_all() -> None:
    for loggers in list(_all):
        loggers.forget()


os.register_at_fork(after_in_child=_forget_all)  # such as workers of a data loader


@dataclass(frozen=True)
class _Queued:
    call: Call
    record: dict[str, Any] | None
    """The line that is appended to the journal after the call."""


class Sender:
    """The queue, the thread and the journal of a logger.

    The journal has a line {"attempt", "call", "steps"} for each call that has returned, with "group" for a report.
    """

    def __init__(self, kind: str, logger: Logger, journal: Path, attempt: int) -> None:
        self._kind = kind
        self._logger = logger
        self._journal = journal
        self._attempt = attempt
        self._queue: queue.Queue[_Queued | None] = queue.Queue(QUEUE_CALLS)
        self._thread = threading.Thread(target=self._send, name=f"hpc-det-{kind}", daemon=True)
        self._dropped = 0
        self._failed = False

    def start(self, call: Call, steps: int) -> None:
        """Start the thread with this call."""
        self.put("begin", steps, call)
        self._thread.start()

    def put(self, name: str, steps: int, call: Call, group: str | None = None) -> None:
        """Queue a call, or drop it if the queue is full."""
        if self._failed:
            return
        record = {"attempt": self._attempt, "call": name, "steps": steps, **({"group": group} if group else {})}
        try:
            self._queue.put_nowait(_Queued(call, record))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._say(f"{QUEUE_CALLS} calls wait for the server; further reports are dropped until it accepts some")

    def end(self, call: Call) -> None:
        """Queue the last call, in place of an older one if the queue is full."""
        for item in (_Queued(call, None), None):
            while not self._failed:
                try:
                    self._queue.put_nowait(item)
                    break
                except queue.Full:
                    self._drop_oldest()

    def join(self, until: float, offline_until: float) -> None:
        """Wait for the thread until a time of time.monotonic; until `offline_until` if it writes to local files."""
        if self._thread.ident is None:  # it was never started
            return
        self._thread.join(max(until - time.monotonic(), 0))
        if self._logger.is_offline:
            self._thread.join(max(offline_until - time.monotonic(), 0))
        if self._thread.is_alive():
            self._say(f"it did not finish in time; up to {self._queue.qsize()} calls were not sent")
        elif self._dropped and not self._failed:
            self._say(f"{self._dropped} calls were dropped")

    def _drop_oldest(self) -> None:
        try:
            self._queue.get_nowait()
            self._dropped += 1
        except queue.Empty:
            pass

    def _send(self) -> None:
        try:
            while queued := self._queue.get():
                queued.call(self._logger)
                if queued.record:
                    append_line(self._journal, queued.record, durable=False)
        except BaseException as error:  # a library may also call sys.exit
            self._failed = True
            with self._queue.mutex:
                self._queue.queue.clear()
            self._say(
                f"disabled for the rest of this attempt: {_words(error)}; training continues, and metrics.jsonl has "
                f"all metrics"
            )

    def _say(self, text: str) -> None:
        say(self._kind, text)


def _sender(
    kind: str, settings: Mapping[str, Any], trial: TrialFolder, spec: Mapping[str, Any], attempt: int
) -> Sender | None:
    """Return the sender of a kind; None, with a printed message, if it cannot be used."""
    try:
        integration = importlib.import_module(f"hpc_det.integrations.{kind}")
        logged = _logged(kind, trial, spec, attempt)
        return Sender(kind, integration.logger(settings, logged), trial.logger_calls(kind), attempt)
    except ModuleNotFoundError as error:
        say(kind, f"disabled: {error}; run {pip_install(f'hpc_det[{kind}]')}")
    except Exception as error:
        say(kind, f"disabled: {_words(error)}")
    return None


def _logged(kind: str, trial: TrialFolder, spec: Mapping[str, Any], attempt: int) -> LoggedTrial:
    make_folders(trial.loggers / kind)
    calls = read_lines(trial.logger_calls(kind))
    reported: dict[str, int] = {}
    for call in calls:
        if call.get("call") == "report":
            reported[call["group"]] = max(call["steps"], reported.get(call["group"], 0))
    return LoggedTrial(
        folder=trial.loggers / kind,
        experiment=spec["experiment_id"],
        trial=spec["trial_id"],
        attempt=attempt,
        name=spec["config"].get("name") or "experiment",
        labels=spec["config"].get("labels") or [],
        hyperparameters=spec["hparams"],
        reported=reported,
        calls=len(calls),
        say=functools.partial(say, kind),
    )


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the scalars in `metrics` as floats, whose names are joined by / where maps are nested."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")
        elif (number := scalar(value)) is not None:
            found[f"{prefix}{name}"] = number
    return found


def _words(error: BaseException) -> str:
    """Return the class and the first line of the message, for the log."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def say(kind: str, text: str) -> None:
    """Print a message of the logger `kind`, without secrets."""
    line = " ".join(without_secrets(text, os.environ).split())
    print(f"hpc-det: logger {kind}: {visible(line)}", flush=True)
