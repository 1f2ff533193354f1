"""The points of a sweep: the login node composes them and saves them with the app's function, and ranks load them.

Hydra composes in two steps: it merges the files of the chosen groups, which takes tens of milliseconds, and then
applies the overrides of values in order, which takes less than one. The result of the first step is cached for all
points that choose the same groups.

cloudpickle stores a function of `__main__` by value, and a function of any other module by name. The files are sealed
with the user's key, and pickles of other users are never read. Pickles of saved apps refer to the classes of this
module by name, so that moving or renaming one would make earlier sweeps unreadable.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import cloudpickle
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hpc_det.errors import UsageError
from hpc_det.node.json_files import write_json
from hpc_det.store.folders import TrialFolder
from hpc_det.sweep.files import SweepFiles


@dataclass(frozen=True)
class Point:
    """A point of a sweep, that is one of Hydra's jobs, in the form in which it is saved."""

    base: bytes
    """The pickled configuration before the overrides of values are applied; many points share it."""
    overrides: tuple[str, ...]
    """All overrides, as a user would write them."""

    def config(self) -> DictConfig:
        """Return the configuration that Hydra composes from the overrides. Raises Hydra's errors."""
        config = cast(DictConfig, pickle.loads(self.base))
        parsed = [override for override in _parsed(self.overrides) if not override.is_hydra_override()]
        chosen = {*config.hydra.overrides.task}  # those with which `base` was composed
        values = [override for override in parsed if override.input_line not in chosen]
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        config.hydra.overrides.task = [override.input_line for override in parsed]
        names = config.hydra.job.config.override_dirname
        config.hydra.job.override_dirname = get_overrides_dirname(
            overrides=parsed, kv_sep=names.kv_sep, item_sep=names.item_sep, exclude_keys=names.exclude_keys
        )
        return config


class Composer(ConfigLoaderImpl):
    """A replacement of Hydra's config loader that composes the same, and faster: the chosen files are merged once."""

    def __init__(self, loader: ConfigLoader) -> None:
        """Take over the state of Hydra's `loader`."""
        vars(self).update(vars(loader))
        self._bases: dict[tuple[str, ...], bytes] = {}
        """Pickled configurations, by the overrides with which they were composed."""
        self._groups: Any = None
        """Hydra's repository of config files; None until it is needed."""
        self._composed: set[Point] = set()
        """Points that were composed without an error."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        point = self.point(master_config, sweep_overrides)
        config = point.config()
        self._composed.add(point)
        return config

    def checked(self, master: DictConfig, overrides: Sequence[str]) -> Point:
        """Return the point for these overrides. Raises Hydra's errors if it cannot be composed."""
        point = self.point(master, overrides)
        if point not in self._composed:
            self.load_sweep_config(master, list(overrides))
        return point

    def point(self, master: DictConfig, overrides: Sequence[str]) -> Point:
        """Return the point for these overrides. Those of values are applied only by `Point.config`."""
        parsed = _parsed(overrides)
        # With RunMode.RUN Hydra rejects overrides with several values: the sweeper must have split them.
        self.validate_sweep_overrides_legal(overrides=parsed, run_mode=RunMode.RUN, from_shell=True)
        # With ${now:...} in a value, all overrides are composed here, so that _fix_time sees the value.
        asks_for_time = any("${now:" in override for override in overrides)
        chosen = tuple(
            str(override.input_line) for override in parsed if asks_for_time or not self._sets_value(override, master)
        )
        if chosen not in self._bases:
            composed = super().load_sweep_config(master, list(chosen))
            _fix_time(master, composed)
            self._bases[chosen] = cloudpickle.dumps(composed)
        return Point(self._bases[chosen], tuple(overrides))

    def _sets_value(self, override: Override, master: DictConfig) -> bool:
        """Return whether the override selects no file: Hydra's rule (hydra/_internal/defaults_list.py)."""
        if self._groups is None:
            own = cast("list[str]", OmegaConf.to_container(master.hydra.overrides.hydra))
            self._groups = self._parse_overrides_and_create_caching_repo(master.hydra.job.config_name, own)[1]
        is_group = self._groups.group_exists(override.key_or_group) and not isinstance(override.value(), dict)
        return not is_group and not override.is_hydra_override()


def _fix_time(master: DictConfig, composed: DictConfig) -> None:
    """Fix `${now:...}` to the time of the sweep, so that it is the same in every point and every attempt."""
    # The resolver `now` caches its results in the configuration (use_cache, hydra/core/utils.py): resolve each format
    # that occurs once, and copy the cache.
    asked = OmegaConf.create(re.findall(r"\$\{now:[^${}]*\}", OmegaConf.to_yaml(composed)))
    OmegaConf.copy_cache(from_config=master, to_config=asked)
    OmegaConf.resolve(asked)
    for config in (master, composed):
        OmegaConf.copy_cache(from_config=asked, to_config=config)


def _parsed(overrides: Sequence[str]) -> list[Override]:
    return list(map(_parsed_one, overrides))


@cache
def _parsed_one(override: str) -> Override:
    """Return the parsed override. Points share most overrides, and the parser is slow, so results are cached and not
    changed.
    """
    return OverridesParser.create().parse_overrides([override])[0]


Checkpoint = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class App:
    """The Hydra app of a sweep, in the form in which it is saved."""

    task_function: TaskFunction
    checkpoint: Checkpoint | None
    """Function that saves the app's work at a stop; None if the app has none."""
    context: HydraContext
    singletons: Any
    """Hydra's global state."""


def checkpoint_of(task_function: TaskFunction) -> Checkpoint | None:
    """Return the function `checkpoint()` of the task function's module; None if it was imported or needs arguments."""
    found = getattr(task_function, "__globals__", {}).get("checkpoint")
    if not inspect.isfunction(found) or found.__module__ != task_function.__module__:
        return None
    needed = [
        p for p in inspect.signature(found).parameters.values() if p.default is p.empty and p.kind < p.VAR_KEYWORD
    ]
    return None if any(p.kind is not p.VAR_POSITIONAL for p in needed) else found


def save(files: SweepFiles, app: App, points: Sequence[Point], first: int) -> None:
    """Write the app and its points to the files of a sweep. `first`: Hydra's number of the first point."""
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
    """Return the saved app, and restore Hydra's global state in this process.

    Its modules must be importable: sys.path must contain the folders of the login node's sys.path.
    """
    app: App = pickle.loads(files.read(files.app))
    Singleton.set_state(app.singletons)
    return app


def load_config(files: SweepFiles, trial: TrialFolder) -> DictConfig:
    """Return the configuration of the trial's point, prepared as Hydra's launchers do."""
    row = files.read_points()[trial.id - 1]
    config = Point(files.read(files.config(row["config"])), tuple(row["overrides"])).config()
    with open_dict(config):
        config.hydra.job.num = row["num"]
        config.hydra.job.id = f"{files.experiment.id}.{trial.id}"
    return config


def _pickled(app: App) -> bytes:
    """Return the pickled app. Raises UsageError if it cannot be pickled."""
    try:
        return cast(bytes, cloudpickle.dumps(app))
    except Exception as error:
        raise UsageError(
            f"{getattr(app.task_function, '__qualname__', app.task_function)}: cannot be sent to jobs: "
            f"{type(error).__name__}: {error}; remove objects that cannot be pickled from the globals that it uses"
        ) from None
