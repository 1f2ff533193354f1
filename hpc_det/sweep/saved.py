"""What the login node saves for the ranks: the app's function, Hydra's state, and the config of each point.

cloudpickle takes a function of `__main__` as it is, and of any other module by its name. The files are sealed with the
user's key, and nobody else's pickles are ever read.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from hpc_det.errors import UsageError
from hpc_det.node.json_files import write_json
from hpc_det.store.folders import TrialFolder
from hpc_det.sweep.files import SweepFiles
from hpc_det.sweep.points import Point

Checkpoint = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class App:
    task_function: TaskFunction
    checkpoint: Checkpoint | None
    """What saves the app's work when it is told to stop."""
    context: HydraContext
    singletons: Any
    """The state of Hydra that lies in globals."""


def checkpoint_of(task_function: TaskFunction) -> Checkpoint | None:
    """The function `checkpoint()` that stands in the same module as the task function.

    One that was imported from elsewhere, or that needs arguments, is something else of that name.
    """
    found = getattr(task_function, "__globals__", {}).get("checkpoint")
    if not inspect.isfunction(found) or found.__module__ != task_function.__module__:
        return None
    needed = [
        p for p in inspect.signature(found).parameters.values() if p.default is p.empty and p.kind < p.VAR_KEYWORD
    ]
    return None if any(p.kind is not p.VAR_POSITIONAL for p in needed) else found


def save(files: SweepFiles, app: App, points: Sequence[Point], first: int) -> None:
    """`first`: Hydra's number of the first point."""
    files.create()
    files.write(files.app, _pickled(app))
    files.write(files.import_path, json.dumps([os.path.abspath(folder) for folder in sys.path]).encode())
    bases: dict[bytes, int] = {}
    for point in points:
        if point.base not in bases:
            bases[point.base] = len(bases) + 1
            files.write(files.config(bases[point.base]), point.base)
    rows = enumerate(points, start=first)
    write_json(
        files.points,
        [{"num": num, "overrides": point.overrides, "config": bases[point.base]} for num, point in rows],
    )


def load_app(files: SweepFiles) -> App:
    """On the node, where modules are found as they were found on the login node."""
    app: App = pickle.loads(files.read(files.app))
    Singleton.set_state(app.singletons)
    return app


def load_config(files: SweepFiles, trial: TrialFolder) -> DictConfig:
    """Of the trial's point, as Hydra's launchers prepare it."""
    row = files.read_points()[trial.id - 1]
    config = Point(files.read(files.config(row["config"])), tuple(row["overrides"])).config()
    with open_dict(config):
        config.hydra.job.num = row["num"]
        config.hydra.job.id = f"{files.experiment.id}.{trial.id}"
    return config


def _pickled(app: App) -> bytes:
    try:
        return cast(bytes, cloudpickle.dumps(app))
    except Exception as error:
        raise UsageError(
            f"{getattr(app.task_function, '__qualname__', app.task_function)}: cannot be sent to jobs: "
            f"{type(error).__name__}: {error}; keep what cannot be pickled out of the globals that it uses"
        ) from None
