"""MLflow: one run for all attempts of a trial, and the copying of offline runs.

MLflow creates the id of a run, which is saved in the trial's folder; later attempts continue that run. Only the client
is used, so that code of the trial may have an active run of its own.

MLflow keeps every value of a metric, also several of one step. The stretch that an attempt trains again after a loss
would therefore be in the history twice, and charts would show both. An exact resume computes the same values again, so
reports at steps that an earlier attempt has sent are left out. The metric and the tag `hpc_det.resumed_at` have the
batches at which an attempt resumed; metrics.jsonl has what each attempt has reported.

An offline attempt writes into a SQLite file below the trial's folder, from which `hpc-det experiment sync` copies.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.tracking import MlflowClient

from hpc_det.config.secrets import without_secrets
from hpc_det.node.json_files import Shape, read_map, write_json

if TYPE_CHECKING:
    from hpc_det.core.loggers import LoggedTrial

URI = "MLFLOW_TRACKING_URI"
ANSWER_S = 4.0
"""Seconds to connect to the server, and for its answer, before the attempt is logged offline.

Less than the wait at the end of training (hpc_det.core.loggers), so that a short training is logged offline, too.
"""
OFFLINE = "offline"
"""Name of the trial's SQLite file in its run file: its path changes if the experiments are moved."""
RESUMED_AT, ATTEMPT, CHECKPOINT = "hpc_det.resumed_at", "hpc_det.attempt", "hpc_det.checkpoint"
STATUS = {"finished": "FINISHED", "waiting": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""Status of a run by the end of an attempt. A trial that waits for the search may end there, so its run is complete."""
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _PARAM_CHARS = 1000, 100, 6000
"""Limits of MLflow for one request, and for the value of a parameter."""
_NO_SERVER = (502, 503, 504)
"""Codes with which a proxy answers in place of a server that is down."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A file with the run of a trial in one store: {"tracking_uri", "run_id"}."""

    path: Path

    def run_id(self, uri: str) -> str | None:
        """Return the id of the run in the store `uri`, or None."""
        found = read_map(self.path, {"tracking_uri": str, "run_id": str})
        return str(found["run_id"]) if found and found["tracking_uri"] == _stored(uri) else None

    def save(self, uri: str, run_id: str) -> None:
        """Save the id of the run in the store `uri`."""
        write_json(self.path, {"tracking_uri": _stored(uri), "run_id": run_id})


def _stored(uri: str) -> str:
    """Return a URI for a file: without a password, which the variable MLFLOW_TRACKING_URI may have."""
    return without_secrets(uri, {})


def online_file(folder: Path) -> RunFile:
    """Return the file with the run on the tracking server. `folder`: that of the logger."""
    return RunFile(path=folder / "run.json")


def offline_file(folder: Path) -> RunFile:
    """Return the file with the run in the SQLite file."""
    return RunFile(path=folder / "offline.json")


def offline_uri(folder: Path) -> str:
    """Return the URI of the trial's SQLite file."""
    return f"sqlite:///{folder.absolute() / 'mlflow.db'}"


class MlflowLogger:
    """The run of an attempt (see hpc_det.core.loggers.Logger)."""

    def __init__(self, settings: Mapping[str, Any], trial: LoggedTrial) -> None:
        self._settings = settings
        self._trial = trial
        self._client: Any = None
        self._run_id = ""
        self.is_offline = settings.get("mode") == "offline"

    def begin(self, steps: int) -> None:
        """Create or continue the run; offline if the server does not answer."""
        self.is_offline = not self._online()
        if self.is_offline:
            self._open(offline_uri(self._trial.folder), offline_file(self._trial.folder), OFFLINE)
        tags = {ATTEMPT: str(self._trial.attempt)}
        if self._trial.attempt > 1:
            tags[RESUMED_AT] = str(steps)
            self._log({RESUMED_AT: float(steps)}, steps)
        self._tag(tags)

    def report(self, group: str, steps: int, metrics: Mapping[str, float]) -> None:
        """Log metrics, unless an earlier attempt has sent a report of this group for these or more batches."""
        if steps > self._trial.reported.get(group, -1):
            self._log({f"{group}/{name}": value for name, value in metrics.items()}, steps)

    def checkpoint(self, steps: int, path: str) -> None:
        """Set tags with the latest checkpoint."""
        self._tag({CHECKPOINT: path, f"{CHECKPOINT}_batches": str(steps)})

    def end(self, kind: str) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._run_id, STATUS[kind])

    def _online(self) -> bool:
        """Open the run on the tracking server and return True; False, with a printed message, if that fails."""
        if self._settings.get("mode") == "offline":
            return False
        uri = self._settings.get("tracking_uri") or os.environ.get(URI)
        try:
            if not uri:
                raise LookupError(f"neither tracking_uri nor the variable {URI} is set")
            _check_answers(uri)
            self._open(uri, online_file(self._trial.folder))
        except Exception as error:
            self._trial.say(f"this attempt is logged offline, for `hpc-det experiment sync`: {error}")
            return False
        return True

    def _open(self, uri: str, file: RunFile, store: str | None = None) -> None:
        """Open the run in the store `uri`; `store`: its name in the file, by default the URI."""
        self._client = MlflowClient(tracking_uri=uri)
        known = file.run_id(store or uri)
        if known:
            self._client.update_run(known, status="RUNNING")
        self._run_id = known or self._created(store or uri, file)

    def _created(self, store: str, file: RunFile) -> str:
        trial = self._trial
        name = self._settings.get("experiment_name") or trial.name
        tags = {"hpc_det.experiment": str(trial.experiment), "hpc_det.trial": str(trial.trial)}
        tags |= {f"hpc_det.label.{_name(label)}": "true" for label in trial.labels}
        run_id = create_run(self._client, name, f"{trial.name} {trial.experiment}/{trial.trial}", tags)
        log_params(self._client, run_id, params_of(trial.hyperparameters))
        file.save(store, run_id)
        return run_id

    def _log(self, metrics: Mapping[str, float], steps: int) -> None:
        now = int(time.time() * 1000)
        log_metrics(self._client, self._run_id, [Metric(_name(name), v, now, steps) for name, v in metrics.items()])

    def _tag(self, tags: Mapping[str, str]) -> None:
        self._client.log_batch(self._run_id, tags=[RunTag(name, value) for name, value in tags.items()])


def _check_answers(uri: str) -> None:
    """Raise an error if `uri` is of an HTTP server that does not answer. MLflow's client would retry for minutes."""
    if urlsplit(uri).scheme not in ("http", "https"):
        return
    # After an SSLError the server is there, and MLflow's client has settings for certificates of its own.
    with suppress(requests.exceptions.SSLError):
        url = f"{uri.rstrip('/')}/health"
        with requests.get(url, timeout=ANSWER_S, allow_redirects=False, stream=True) as answer:
            if answer.status_code in _NO_SERVER:
                answer.raise_for_status()


def logger(settings: Mapping[str, Any], trial: LoggedTrial) -> MlflowLogger:
    """Return the logger for an entry `mlflow` of `loggers`."""
    return MlflowLogger(settings, trial)


# --- requests


def create_run(client: Any, experiment: str, name: str, tags: Mapping[str, str]) -> str:
    """Return the id of a new run in the MLflow experiment of this name, which is created if it is missing."""
    found = client.get_experiment_by_name(experiment)
    if found is None:
        try:
            return create_run_in(client, client.create_experiment(experiment), name, tags)
        except Exception:
            # Another trial may have created it at the same moment; otherwise the error is raised again below.
            found = client.get_experiment_by_name(experiment)
            if found is None:
                raise
    return create_run_in(client, found.experiment_id, name, tags)


def create_run_in(client: Any, experiment_id: str, name: str, tags: Mapping[str, str]) -> str:
    """Return the id of a new run in the MLflow experiment with this id."""
    return str(client.create_run(experiment_id, run_name=name, tags=dict(tags)).info.run_id)


def log_metrics(client: Any, run_id: str, metrics: Sequence[Any]) -> None:
    """Log metrics in requests of the size that MLflow accepts."""
    for at_once in _parts(metrics, _METRICS_AT_ONCE):
        client.log_batch(run_id, metrics=at_once)


def log_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters in requests of the size that MLflow accepts."""
    for at_once in _parts([Param(name, value) for name, value in params.items()], _PARAMS_AT_ONCE):
        client.log_batch(run_id, params=at_once)


def params_of(hyperparameters: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return hyperparameters as MLflow's parameters: nested names joined by a dot, long values cut."""
    found: dict[str, str] = {}
    for name, value in hyperparameters.items():
        if isinstance(value, Mapping):
            found |= params_of(value, f"{prefix}{name}.")
        else:
            found[_name(f"{prefix}{name}")] = str(value)[:_PARAM_CHARS]
    return found


def _name(text: str) -> str:
    """Return `text` with - in place of characters that names in MLflow may not have."""
    return _NOT_IN_NAMES.sub("-", text)


def _parts(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


# --- the copying of offline runs

_COPIED = "copied.json"
_COPIED_SHAPE: Shape = {"run_id": str, "metrics": dict}


class OfflineRun:
    """The run in the SQLite file of a trial, and how much of it is on the tracking server already."""

    def __init__(self, folder: Path, uri: str) -> None:
        """`folder`: that of the logger; `uri`: the tracking server."""
        self._folder = folder
        self._uri = uri
        self._source = MlflowClient(tracking_uri=offline_uri(folder))
        run_id = offline_file(folder).run_id(OFFLINE)
        self._run = self._source.get_run(run_id)
        self._counts: dict[str, int] = {}
        """Number of copied values, by metric."""

    def missing(self) -> dict[str, list[Any]]:
        """Return the values that are not copied yet, oldest first, by metric."""
        copied = read_map(self._folder / _COPIED, _COPIED_SHAPE)
        target = online_file(self._folder).run_id(self._uri)
        self._counts = dict(copied["metrics"]) if copied and copied["run_id"] == target else {}
        return {name: values for name in self._run.data.metrics if (values := self._values(name))}

    def _values(self, name: str) -> list[Any]:
        history = self._source.get_metric_history(self._run.info.run_id, name)
        ordered = sorted(history, key=lambda value: (value.timestamp, value.step))
        return ordered[self._counts.get(name, 0) :]

    def copy(self, experiment: str) -> int:
        """Copy what is missing and return the number of values. `experiment`: MLflow's, for a run that is created.

        A copy that was interrupted is continued; at most the values of one request are then copied twice.
        """
        client = MlflowClient(tracking_uri=self._uri)
        file, missing = online_file(self._folder), self.missing()
        target = file.run_id(self._uri)
        if target is None:
            target = self._created(client, experiment)
            file.save(self._uri, target)
        for name, values in missing.items():
            for part in _parts(values, _METRICS_AT_ONCE):
                client.log_batch(target, metrics=[Metric(v.key, v.value, v.timestamp, v.step) for v in part])
                self._counts[name] = self._counts.get(name, 0) + len(part)
                write_json(self._folder / _COPIED, {"run_id": target, "metrics": self._counts})
        self._copy_end(client, target)
        return sum(map(len, missing.values()))

    def _created(self, client: Any, experiment: str) -> str:
        tags = {name: value for name, value in self._run.data.tags.items() if name.startswith("hpc_det.")}
        run_id = create_run(client, experiment, self._run.info.run_name, {**tags, ATTEMPT: "0"})
        log_params(client, run_id, self._run.data.params)
        return run_id

    def _copy_end(self, client: Any, target: str) -> None:
        """Copy tags and status, unless a later attempt was online."""
        tags = {name: value for name, value in self._run.data.tags.items() if name.startswith("hpc_det.")}
        online = client.get_run(target).data.tags.get(ATTEMPT, "0")
        if int(tags.get(ATTEMPT, "0")) < int(online):
            return
        client.log_batch(target, tags=[RunTag(name, value) for name, value in tags.items()])
        info = self._run.info
        if RunStatus.is_terminated(RunStatus.from_string(info.status)):
            client.set_terminated(target, info.status, info.end_time)


def has_offline_run(folder: Path) -> bool:
    """Return whether the logger's folder has a run in a SQLite file."""
    return offline_file(folder).path.exists()
