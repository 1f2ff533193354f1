"""The files that make a run outside a job an experiment: the configuration and the plan that commands read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.config.argument_checks import check_arguments
from hpc_det.config.merge import Tree, leaves, merge
from hpc_det.config.plain_containers import plain_containers
from hpc_det.config.plain_yaml import dump_yaml
from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError, nearest
from hpc_det.node.files import make_folder, write_atomic
from hpc_det.node.json_files import problem_of, write_json
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.experiment_config import WHOLE, write_secrets
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.local_run import Script, write_script

SEARCHER: Tree = {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
DEFAULTS: Tree = {
    "description": "",
    "labels": [],
    "data": {},
    "max_restarts": 5,
    "reproducibility": {"experiment_seed": None},
    "environment": {"environment_variables": []},
    "checkpoint_storage": {"type": None, "save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1},
    "log_policies": [],
    "notify": [],
    "loggers": [],
    "retention_policy": {"log_retention_days": None},
}
"""The keys of a configuration that commands read, with the defaults of hpc_det.config.schema."""


IN_EFFECT = {
    "asynchronous_checkpoints",
    "checkpoint_interval",
    "checkpoint_policy",
    "checkpoint_staging",
    "checkpoint_storage",
    "data",
    "description",
    "labels",
    "loggers",
    "min_checkpoint_period",
    "name",
    "profiling",
    "reproducibility",
    "searcher",
}
"""The keys of a configuration that have an effect outside a job."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `init`, and the configuration that commands read."""

    hparams: dict[str, Any]
    config: dict[str, Any]
    """The argument, with the name of the run."""
    tree: Tree
    """The effective configuration."""

    @classmethod
    def of(cls, name: str, hparams: dict[str, Any], config: dict[str, Any]) -> Arguments:
        """Return the arguments of a run with this name.

        Raises UsageError for values that JSON cannot represent, and for invalid values of keys with an effect.
        """
        hparams, config = plain_containers(hparams), plain_containers(config)
        _check_json(hparams, config)
        check_arguments(config, IN_EFFECT)
        return cls(hparams=hparams, config={**config, "name": name}, tree=_effective(name, hparams, config))

    @classmethod
    def of_driver(cls, name: str, hparams: dict[str, Any], sections: Mapping[str, Any]) -> Arguments:
        """Return those of a TorchTrainer, `fit` or `tune_run`: `sections` replace sections of the configuration."""
        tree = {**_effective(name, hparams, {}), **sections}
        return cls(hparams=hparams, config={"name": name}, tree=tree)

    @property
    def notes(self) -> Iterator[str]:
        """A line for each key of the configuration without an effect, and for a searcher that needs several trials."""
        for key in sorted(self.config.keys() - IN_EFFECT):
            meant = nearest(key, IN_EFFECT)
            yield f"config: {key!r} has no effect outside a job" + (f"; {meant}" if meant else "")
        searcher = (self.config.get("searcher") or {}).get("name") or SEARCHER["name"]
        if searcher != SEARCHER["name"]:
            yield f"config: searcher.name {searcher!r} has no effect outside a job, where a run is one trial"


def _effective(name: str, hparams: Mapping[str, Any], config: Mapping[str, Any]) -> Tree:
    given = {key: value for key, value in config.items() if key != "searcher"}
    tree = {
        **merge({"name": name, **DEFAULTS}, given),
        "name": name,
        "entrypoint": list(sys.orig_argv),
        "hyperparameters": _constants(hparams),
        "searcher": _searcher(config.get("searcher") or {}),
    }
    if problem := problem_of({**WHOLE, "reproducibility": dict, "labels": list[str]}, tree):
        raise UsageError(f"config: {problem}; give it as in the configuration of an experiment")
    return tree


def _check_json(hparams: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    try:
        json.dumps([hparams, config], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"hparams, config: both are stored as JSON: {error}; use finite numbers, texts, lists and maps"
        ) from None


def _searcher(given: Any) -> Tree:
    """Return the section `searcher`: without a job there is no search, so it is `single` in any case."""
    if not isinstance(given, Mapping):
        raise UsageError(f"config: searcher is {given!r}; give it as in the configuration of an experiment")
    known = {key: value for key in SEARCHER if (value := given.get(key)) is not None}
    length = given.get("max_length")
    length = {"batches": length} if isinstance(length, int) else length
    return {**SEARCHER, **known, "name": "single", "max_length": length or None}


def _constants(hparams: Mapping[str, Any]) -> Tree:
    """Return the hyperparameters as an experiment file contains them, where a map with a `type` is a range."""
    return {name: _constant(value) for name, value in hparams.items()}


def _constant(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {"type": "const", "val": dict(value)} if "type" in value else _constants(value)


def make_experiment(folder: ExperimentFolder, script: Script) -> None:
    """Create the folders of a new run, and the file that marks it as a run outside a job."""
    for needed in (folder.search, folder.jobs):
        make_folder(needed)
    write_script(folder, script)


@dataclass(frozen=True, kw_only=True)
class GangSize:
    """The processes of a run."""

    nodes: int
    ranks_per_node: int
    has_gpus: bool


def write_plan_and_config(folder: ExperimentFolder, arguments: Arguments, size: GangSize) -> None:
    """Write the plan and the effective configuration of the next attempt."""
    write_secrets(folder.effective, arguments.tree, masked(arguments.tree))
    write_atomic(folder.plan, _plan(folder, arguments.tree, size).to_json(), private=True)


def write_config_for_people(folder: ExperimentFolder, arguments: Arguments) -> None:
    """Write the configuration with masked secrets and the origin of each value; from then on commands list the run."""
    given = {path for path, _ in leaves({**arguments.config, "hyperparameters": arguments.hparams})}
    origins = {path: "config" for path, _ in leaves(arguments.tree) if path in given}
    write_json(folder.origin, origins)
    write_atomic(folder.config, dump_yaml(masked(arguments.tree)))


def _plan(folder: ExperimentFolder, tree: Tree, size: GangSize) -> JobPlan:
    """Return a plan of the processes that run; nothing is started with it."""
    return JobPlan(
        experiment_id=folder.id,
        name=tree["name"],
        scheduler="local",
        folder=str(folder.path),
        code=str(Path.cwd()),
        python=sys.executable,
        entrypoint=tuple(tree["entrypoint"]),
        environment=(),
        nodes=size.nodes,
        ranks_per_node=size.ranks_per_node,
        job_nodes=size.nodes,
        job_slots_per_node=size.ranks_per_node,
        slot_type="gpu" if size.has_gpus else "cpu",
        cpus_per_rank=max(len(os.sched_getaffinity(0)) // size.ranks_per_node, 1),
        max_restarts=0,
        partition=None,
        account=None,
        qos=None,
        priority=None,
        time_limit_min=None,
        signal_lead_s=0,
        gpu_flag="",
        gpu_type=None,
        mem_per_node=None,
        submit_args=(),
        srun_args=(),
        start_agents_with="",
        mpi_launcher=(),
        network_interface=None,
        grace_time_s=None,
        resume="none",
        chain_length=0,
        health_checks=False,
        exclude_nodes_for_min=0,
        hang_timeout_s=0,
        modules=(),
        setup=(),
        container=None,
        scratch=None,
    )
