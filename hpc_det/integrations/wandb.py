"""Weights & Biases: one run for all attempts of a trial, and the upload of offline runs.

The id of the run is saved in the trial's folder before the first `wandb.init`, and later attempts resume it. The x axis
of charts is the number of batches, which each row contains, instead of W&B's own step: W&B drops rows whose step is
below the last one. The stretch that an attempt trains again after a loss is in the run twice; `hpc_det/resumed_at`
contains the batches at which attempts resumed.

An offline attempt is a folder for itself. `hpc-det experiment sync` uploads the folders in the order of attempts into
the same run. Offline, W&B would number the rows of each attempt from 0 and the upload would replace rows, so later
attempts begin their steps after all earlier rows.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import requests
import wandb

from hpc_det.errors import HpcDetError
from hpc_det.node.files import make_folder
from hpc_det.node.json_files import read_map, write_json

if TYPE_CHECKING:
    from hpc_det.core.loggers import LoggedTrial

INIT_S = 60.0
"""Seconds that wandb.init waits for the server before the attempt is logged offline."""
ANSWER_S = 4.0
"""Seconds in which the server must accept a connection, and in which it must answer."""
SYNC_S = 3600.0
"""Seconds that the upload of one attempt may take."""
BATCHES = "batches"
_ID = "run.json"
_SERVER = "https://api.wandb.ai"


class WandbLogger:
    """The run of an attempt (see hpc_det.core.loggers.Logger)."""

    def __init__(self, settings: Mapping[str, Any], trial: LoggedTrial) -> None:
        self._settings = settings
        self._trial = trial
        self._run: Any = None
        self._row: int | None = None
        """Step of the next row; None online, where W&B counts."""
        self.is_offline = settings.get("mode") == "offline"

    def begin(self, steps: int) -> None:
        """Start or resume the run; offline if the server does not answer."""
        self._run = self._online() if self._settings.get("mode") != "offline" else None
        if self._run is None:
            self.is_offline = True
            self._run = self._started("offline")
            # Besides the calls, each attempt adds a row at its beginning.
            self._row = self._trial.calls + self._trial.attempt if self._trial.calls else None
        self._run.define_metric(BATCHES)
        self._run.define_metric("*", step_metric=BATCHES)
        if self._trial.attempt > 1:
            self._log(steps, {"hpc_det/resumed_at": steps, "hpc_det/attempt": self._trial.attempt})

    def report(self, group: str, steps: int, metrics: Mapping[str, float]) -> None:
        """Log a row."""
        self._log(steps, {f"{group}/{name}": value for name, value in metrics.items()})

    def checkpoint(self, steps: int, path: str) -> None:
        """Log a row with the path."""
        self._log(steps, {"hpc_det/checkpoint": path})

    def end(self, kind: str) -> None:
        """Finish the run: as failed, as preempted for "stopped", otherwise as finished."""
        if kind == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(kind in ("stopped", "failed")))

    def _log(self, steps: int, values: Mapping[str, Any]) -> None:
        row = {**values, BATCHES: steps}
        if self._row is None:
            self._run.log(row)
        else:
            self._run.log(row, step=self._row)
            self._row += 1

    def _online(self) -> Any | None:
        """Return the run, or None with a printed message if there is no server or no API key."""
        try:
            insist_on_answer(self._settings.get("base_url") or os.environ.get("WANDB_BASE_URL", _SERVER))
            run = self._started("online")
        except Exception as error:
            self._trial.say(f"this attempt is logged offline, for `hpc-det experiment sync`: {error}")
            if wandb.run is None:  # otherwise the service also has a run of the trial's code
                wandb.teardown()  # the service would refuse the same id for the offline run
            return None
        self._trial.say(str(run.url))
        return run

    def _started(self, mode: Literal["online", "offline"]) -> Any:
        trial = self._trial
        folder = trial.folder / f"attempt-{trial.attempt}"
        make_folder(folder)
        return wandb.init(
            id=self._run_id(),
            resume="allow",
            project=self._settings.get("project"),
            entity=self._settings.get("entity"),
            group=trial.name,
            name=f"{trial.name} {trial.experiment}/{trial.trial}",
            tags=list(dict.fromkeys([*trial.labels, *self._settings.get("tags", ())])),
            config={**trial.hyperparameters, "hpc_det": {"experiment": trial.experiment, "trial": trial.trial}},
            dir=str(folder),
            mode=mode,
            settings=wandb.Settings(init_timeout=INIT_S, console="off", silent=True, **self._server()),
        )

    def _server(self) -> dict[str, str]:
        url = self._settings.get("base_url")
        return {"base_url": url} if url else {}

    def _run_id(self) -> str:
        """Return the id of the trial's run, which the first call saves."""
        path = self._trial.folder / _ID
        if (found := read_map(path, {"id": str})) is None:
            # The random part distinguishes experiments of several users, or roots, in one project.
            made = f"{self._trial.name}-{self._trial.experiment}-{self._trial.trial}-{secrets.token_hex(5)}"
            found = {"id": re.sub(r"[^A-Za-z0-9_-]+", "-", made)[-64:]}
            write_json(path, found)
        return str(found["id"])


def insist_on_answer(url: str) -> None:
    """Raise an error if no server answers. W&B waits for INIT_S, and a run that ends by then loses its rows."""
    with suppress(requests.exceptions.SSLError):  # the server is there, and W&B has settings for certificates
        requests.get(url, timeout=ANSWER_S, allow_redirects=False, stream=True).close()


def logger(settings: Mapping[str, Any], trial: LoggedTrial) -> WandbLogger:
    """Return the logger for an entry `wandb` of `loggers`."""
    return WandbLogger(settings, trial)


# --- the upload of offline runs


def offline_runs(folder: Path) -> list[Path]:
    """Return the folders of a trial's offline attempts that are not uploaded yet, in the order of attempts."""
    runs = sorted(folder.glob("attempt-*/wandb/offline-run-*"), key=lambda run: (attempt_of(run), run.name))
    return [run for run in runs if not any(run.glob("*.wandb.synced"))]


def attempt_of(run: Path) -> int:
    """Return the number of the attempt that wrote an offline run."""
    return int(run.parts[-3].removeprefix("attempt-"))


def upload(runs: list[Path], settings: Mapping[str, Any]) -> Iterator[str]:
    """Upload offline runs, one after the other, and yield a sentence for each. Raises HpcDetError at the first failure.

    A later run is not uploaded after a failure, since W&B appends rows in the order of uploads.
    """
    for run in runs:
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes", str(run)],
            env=_environment(run, settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SYNC_S,
        )
        said = done.stdout.strip().splitlines()
        if done.returncode or not any(run.glob("*.wandb.synced")):
            raise HpcDetError(f"`wandb sync {run}` exited with {done.returncode}: {' '.join(said[-3:]) or 'no output'}")
        yield f"uploaded {run.name}"


def _environment(run: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of `wandb sync`: a run that exists on the server is resumed, which appends to it."""
    env = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_RUN_ID")}
    server = settings.get("base_url")
    return {
        **env,
        "WANDB_RESUME": "allow",
        "WANDB_DIR": str(run.parents[1]),
        **({"WANDB_BASE_URL": server} if server else {}),
    }
