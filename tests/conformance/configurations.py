"""Configurations of experiments that Determined accepts or refuses.

All paths of `follows` are below schemas/test_cases/v0 of Determined 0.38.1, except where they name another folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.conformance.row import Row

CASES = "schemas/test_cases/v0"


@dataclass(frozen=True, kw_only=True)
class Configuration(Row):
    """Keys that are added to a small experiment, and the problems that hpc_det has with them."""

    keys: dict[str, Any]
    refused: tuple[str, ...] = ()
    """Paths of the values that have problems; empty: the configuration is accepted."""
    values: dict[str, Any] = field(default_factory=dict)
    """By its path, a value of the effective configuration."""


def searching(name: str, **keys: Any) -> dict[str, Any]:
    return {"searcher": {"name": name, "metric": "error", **keys}}


def stored(kind: str, **keys: Any) -> dict[str, Any]:
    return {"checkpoint_storage": {"type": kind, **keys}}


def hyperparameters(**keys: Any) -> dict[str, Any]:
    return {"hyperparameters": keys}


def _searchers() -> list[Configuration]:
    file = f"{CASES}/searchers.yaml"
    defaults = f"{CASES}/defaults.yaml"
    length = {"max_length": {"batches": 640}}
    old = "refused with the searcher that replaces it; Determined stopped running this searcher, too"
    return [
        Configuration(
            case="a single searcher with all keys",
            follows=file,
            keys=searching(
                "single", **length, smaller_is_better=False, source_trial_id=None, source_checkpoint_uuid=None
            ),
            values={"searcher.smaller_is_better": False},
        ),
        Configuration(
            case="a single searcher with a plain number as its length",
            follows=file,
            keys={**searching("single", max_length=12), "entrypoint": "bash train.sh"},
        ),
        Configuration(
            case="a random searcher",
            follows=defaults,
            keys=searching("random", **length, max_trials=25, source_checkpoint_uuid="a-checkpoint"),
            values={"searcher.max_concurrent_trials": 16, "searcher.smaller_is_better": True},
        ),
        Configuration(
            case="a random searcher without the number of its trials",
            follows="schemas/expconf/v0/searcher-random.json",
            keys=searching("random", **length),
            refused=("searcher.max_trials",),
        ),
        Configuration(
            case="a grid searcher",
            follows=defaults,
            keys={**searching("grid", **length), **hyperparameters(width={"type": "categorical", "vals": [8, 16]})},
            values={"searcher.max_concurrent_trials": 16},
        ),
        Configuration(
            case="an async_halving searcher",
            follows=defaults,
            keys=searching("async_halving", **length, num_rungs=3, max_trials=25),
            values={"searcher.divisor": 4, "searcher.max_concurrent_trials": 16},
        ),
        Configuration(
            case="an async_halving searcher with all keys of 0.19",
            follows=file,
            keys=searching(
                "async_halving",
                **length,
                num_rungs=3,
                max_trials=25,
                divisor=2.5,
                max_concurrent_trials=3,
                stop_once=True,
            ),
            values={"searcher.divisor": 2.5, "searcher.stop_once": True},
        ),
        Configuration(
            case="an adaptive_asha searcher",
            follows=defaults,
            keys=searching("adaptive_asha", **length, max_trials=25),
            values={
                "searcher.bracket_rungs": [],
                "searcher.divisor": 4,
                "searcher.mode": "standard",
                "searcher.max_rungs": 5,
                "searcher.max_concurrent_trials": 16,
            },
        ),
        Configuration(
            case="an adaptive_asha searcher with rungs of its own",
            follows=file,
            keys=searching("adaptive_asha", **length, max_trials=25, bracket_rungs=[1, 3], divisor=3, stop_once=True),
            values={"searcher.bracket_rungs": [1, 3]},
        ),
        Configuration(
            case="an adaptive_asha searcher of 0.38, with time_metric and max_time",
            follows="schemas/expconf/v0/searcher-adaptive-asha.json",
            keys=searching("adaptive_asha", time_metric="batches", max_time=640, max_trials=25),
        ),
        Configuration(
            case="a mode that there is not",
            follows="schemas/expconf/v0/searcher-adaptive-asha.json",
            keys=searching("adaptive_asha", **length, max_trials=25, mode="eager"),
            refused=("searcher.mode",),
        ),
        Configuration(
            case="a searcher without a metric",
            follows="schemas/expconf/v0/searcher.json",
            keys={"searcher": {"name": "single", **length}},
            refused=("searcher.metric",),
        ),
        Configuration(
            case="a searcher of an unknown name",
            follows="schemas/expconf/v0/searcher.json",
            keys=searching("greedy", **length),
            refused=("searcher.name",),
        ),
        *(
            Configuration(
                case=f"the searcher {name}, which Determined only reads",
                follows=file,
                keys=searching(name, **length, **more),
                refused=("searcher.name",),
                differs=old,
            )
            for name, more in (
                ("adaptive", {"budget": {"batches": 900}}),
                ("adaptive_simple", {"max_trials": 9}),
                ("sync_halving", {"budget": {"epochs": 2}, "num_rungs": 3}),
            )
        ),
    ]


def _lengths() -> list[Configuration]:
    file = f"{CASES}/length.yaml"

    def row(case: str, length: Any, *, is_refused: bool = False) -> Configuration:
        path = ("min_validation_period",) if is_refused else ()
        return Configuration(case=case, follows=file, keys={"min_validation_period": length}, refused=path)

    return [
        Configuration(
            case="a length in records",
            follows=file,
            keys={"min_validation_period": {"records": 300}, **hyperparameters(global_batch_size=30)},
        ),
        row("a length in batches", {"batches": 3}),
        row("a length in epochs", {"epochs": 3}),
        row("a period of no batches", {"batches": 0}),
        row("a negative length", {"batches": -3}, is_refused=True),
        row("a length without a unit and a number", {}, is_refused=True),
        row("a length in two units", {"batches": 3, "records": 300}, is_refused=True),
    ]


def _hyperparameters() -> list[Configuration]:
    file = f"{CASES}/hyperparameters.yaml"
    grids = f"{CASES}/misc.yaml"
    constants: dict[str, Any] = {
        "nothing": None,
        "yes": True,
        "whole": 3,
        "fraction": 0.5,
        "words": ["up", 2, "down"],
        "nested": {"deep": {"deeper": "leaf"}},
        "written": {"type": "const", "val": {"left": 1, "right": [2]}},
    }
    ranges: dict[str, Any] = {
        "whole": {"type": "int", "minval": 3, "maxval": 4},
        "real": {"type": "double", "minval": 0.1, "maxval": 0.2},
        "power": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
        "choice": {"type": "categorical", "vals": [None, False, 0, "word", [1, 2], {"a": "map"}]},
    }
    rows = [
        Configuration(case="constants of every kind", follows=file, keys=hyperparameters(**constants)),
        Configuration(
            case="ranges of every kind",
            follows=file,
            keys={**searching("random", max_length={"batches": 9}, max_trials=2), **hyperparameters(**ranges)},
        ),
        Configuration(
            case="a categorical hyperparameter without values, in a map",
            follows=file,
            keys=hyperparameters(outer={"inner": {"type": "categorical"}}),
            refused=("hyperparameters.outer.inner.vals",),
        ),
        Configuration(
            case="bounds of a range in the wrong order",
            follows="schemas/expconf/v0/hyperparameter-int.json",
            keys={
                **searching("random", max_length={"batches": 9}, max_trials=2),
                **hyperparameters(whole={"type": "int", "minval": 9, "maxval": 3}),
            },
            refused=("hyperparameters.whole.minval",),
        ),
    ]
    for kind in ("int", "double", "log"):
        axis = {"type": kind, "minval": 1, "maxval": 4, **({"base": 10} if kind == "log" else {})}
        grid = searching("grid", max_length={"batches": 9})
        rows += [
            Configuration(
                case=f"a grid over a range of type {kind} with a count",
                follows=grids,
                keys={**grid, **hyperparameters(outer={"axis": {**axis, "count": 2}})},
            ),
            Configuration(
                case=f"a grid over a range of type {kind} without a count",
                follows=grids,
                keys={**grid, **hyperparameters(outer={"axis": axis})},
                refused=("hyperparameters.outer.axis.count",),
            ),
        ]
    return rows


def _storages() -> list[Configuration]:
    unions, misc, azure = (f"{CASES}/{name}.yaml" for name in ("unions", "misc", "eventually"))
    rows = [
        Configuration(
            case="shared_fs with all keys of a stored configuration",
            follows=unions,
            keys=stored(
                "shared_fs",
                host_path="/data",
                storage_path="checkpoints",
                propagation="rprivate",
                container_path=None,
            ),
            values={"checkpoint_storage.save_trial_latest": 1, "checkpoint_storage.save_experiment_best": 0},
        ),
        Configuration(
            case="shared_fs with the path of checkpoints that older versions wrote",
            follows=unions,
            keys=stored("shared_fs", host_path="/data", checkpoint_path="/ckpt"),
            refused=("checkpoint_storage.checkpoint_path",),
            differs="refused, with storage_path as the remedy; Determined ignored the key",
        ),
        Configuration(
            case="shared_fs with a storage_path outside host_path",
            follows=f"{CASES}/compare_properties.yaml",
            keys=stored("shared_fs", host_path="/data", storage_path="/elsewhere"),
            refused=("checkpoint_storage.storage_path",),
        ),
        Configuration(
            case="shared_fs with a storage_path that leads out of host_path",
            follows=f"{CASES}/compare_properties.yaml",
            keys=stored("shared_fs", host_path="/data", storage_path="a/../../elsewhere"),
            refused=("checkpoint_storage.storage_path",),
        ),
        Configuration(case="a directory", follows=unions, keys=stored("directory", container_path="/data/ckpt")),
        Configuration(
            case="s3 without a prefix",
            follows=unions,
            keys=stored("s3", bucket="b", access_key="k", secret_key="s", endpoint_url="http://10.0.0.4:9000"),
        ),
        Configuration(case="gcs", follows=unions, keys=stored("gcs", bucket="b")),
        Configuration(
            case="azure with a connection string",
            follows=azure,
            keys=stored("azure", container="c", connection_string="s"),
        ),
        Configuration(
            case="azure with an account and a credential",
            follows=misc,
            keys=stored("azure", container="c", account_url="u", credential="k"),
        ),
        Configuration(
            case="azure without anything",
            follows=azure,
            keys=stored("azure"),
            refused=("checkpoint_storage.container", "checkpoint_storage.connection_string"),
        ),
        Configuration(
            case="azure with a connection string and an account",
            follows=azure,
            keys=stored("azure", container="c", connection_string="s", account_url="u"),
            refused=("checkpoint_storage.connection_string",),
        ),
        Configuration(
            case="azure with a connection string and a credential",
            follows=misc,
            keys=stored("azure", container="c", connection_string="s", credential="k"),
            refused=("checkpoint_storage.credential",),
        ),
    ]
    for kind in ("s3", "gcs"):
        for prefix in ("a/./b", "a/.../b/"):
            rows.append(
                Configuration(
                    case=f"{kind} with the prefix {prefix}", follows=misc, keys=stored(kind, bucket="b", prefix=prefix)
                )
            )
        for prefix in ("..", "../a", "a/../b", "a/b/.."):
            rows.append(
                Configuration(
                    case=f"{kind} with the prefix {prefix}",
                    follows=misc,
                    keys=stored(kind, bucket="b", prefix=prefix),
                    refused=("checkpoint_storage.prefix",),
                )
            )
    return rows


def _environment() -> list[Configuration]:
    unions, misc = f"{CASES}/unions.yaml", f"{CASES}/misc.yaml"
    return [
        Configuration(
            case="one image and one list of variables",
            follows=unions,
            keys={"environment": {"image": "/images/site.sif", "environment_variables": ["PLACE=here"]}},
        ),
        Configuration(
            case="images and variables by kind of slot",
            follows=unions,
            keys={
                "environment": {
                    "image": {"cpu": "/images/a.sif", "cuda": "/images/b.sif", "rocm": "/images/c.sif"},
                    "environment_variables": {"cpu": ["P=1"], "cuda": ["P=2"], "rocm": ["P=3"]},
                }
            },
        ),
        Configuration(
            case="gpu, the old name of cuda",
            follows=f"{CASES}/gpu-cuda-migration.yaml",
            keys={"environment": {"image": {"gpu": "/images/b.sif"}, "environment_variables": {"gpu": ["P=2"]}}},
        ),
        Configuration(
            case="a mount of a relative host path onto the working directory itself",
            follows=misc,
            keys={"bind_mounts": [{"host_path": "data", "container_path": "."}]},
            refused=("bind_mounts[0].host_path", "bind_mounts[0].container_path"),
        ),
        Configuration(
            case="the defaults of a mount",
            follows=f"{CASES}/defaults.yaml",
            keys={
                "bind_mounts": [{"host_path": "/data", "container_path": "/in"}],
                "environment": {"image": "/images/site.sif"},
            },
            values={
                "bind_mounts": [
                    {"host_path": "/data", "container_path": "/in", "read_only": False, "propagation": "rprivate"}
                ]
            },
        ),
        Configuration(
            case="devices as texts and as maps",
            follows=f"{CASES}/defaults.yaml",
            keys={"resources": {"devices": [{"host_path": "/dev/a", "container_path": "/dev/b"}, "/dev/c:/dev/d:r"]}},
        ),
        Configuration(
            case="pod_spec",
            follows=f"{CASES}/environment.yaml",
            keys={"environment": {"pod_spec": {"spec": {"containers": [{"name": "determined-container"}]}}}},
            differs="Determined checks it; here it is for another platform and has no effect, which a note says",
        ),
        Configuration(
            case="slots beside slots_per_trial",
            follows=misc,
            keys={"resources": {"slots": 1, "slots_per_trial": 1}},
            refused=("resources.slots",),
            differs="refused, with slots_per_trial as the remedy; Determined ignored the key",
        ),
        *(
            Configuration(
                case=f"a shared memory of {size!r}",
                follows=misc,
                keys={"resources": {"shm_size": size}},
                refused=refused,
            )
            for size, refused in (
                ("1.5 gb", ()),
                (1, ()),
                ("4096 b", ()),
                ("giga", ("resources.shm_size",)),
                ("1.gb", ("resources.shm_size",)),
                ("1 gi", ("resources.shm_size",)),
                ("1 i", ("resources.shm_size",)),
            )
        ),
    ]


def _rest() -> list[Configuration]:
    misc, experiment, policies = (f"{CASES}/{name}.yaml" for name in ("misc", "experiment", "log_policies"))
    return [
        Configuration(
            case="an entrypoint that is a command",
            follows=f"{CASES}/entrypoint.yaml",
            keys={"entrypoint": "python3 train.py"},
        ),
        Configuration(
            case="an entrypoint that is a list",
            follows=f"{CASES}/entrypoint.yaml",
            keys={"entrypoint": ["python3", "-m", "determined.launch.autohorovod", "--trial", "model_def:MyTrial"]},
        ),
        Configuration(
            case="an entrypoint that is a module and a class",
            follows=experiment,
            keys={"entrypoint": "model_def:MyTrial"},
        ),
        Configuration(
            case="an unknown key",
            follows="schemas/expconf/v0/experiment.json",
            keys={"restarts": 3},
            refused=("restarts",),
        ),
        Configuration(case="profiling with no key", follows=misc, keys={"profiling": {}}),
        Configuration(case="profiling from batch 4 to 4", follows=misc, keys=_profiling(4, 4)),
        Configuration(
            case="profiling that ends before it begins",
            follows=misc,
            keys=_profiling(40, 4),
            refused=("profiling.end_after_batch",),
        ),
        Configuration(
            case="two log policies of the form of 0.25",
            follows=policies,
            keys={
                "log_policies": [
                    {"pattern": "x", "action": {"type": "exclude_node"}},
                    {"pattern": "y", "action": {"type": "cancel_retries"}},
                ]
            },
        ),
        Configuration(
            case="a log policy of the form of 0.38",
            follows=policies,
            keys={"log_policies": [{"name": "n", "pattern": "x", "action": "cancel_retries"}]},
        ),
        Configuration(
            case="a log policy with an unknown action",
            follows=policies,
            keys={"log_policies": [{"name": "n", "pattern": "x", "action": "shout"}]},
            refused=("log_policies[0].action",),
        ),
        Configuration(
            case="a log policy without a name and a pattern",
            follows=policies,
            keys={"log_policies": [{}]},
            refused=("log_policies[0].pattern",),
        ),
        Configuration(
            case="security.kerberos",
            follows=f"{CASES}/optional_ref.yaml",
            keys={"security": {"kerberos": {"config_file": "krb5.conf"}}},
        ),
        Configuration(
            case="every key as a stored configuration has it",
            follows=experiment,
            keys=STORED,
            values={"resources.slots_per_trial": 1, "max_restarts": 5, "optimizations.aggregation_frequency": 1},
        ),
    ]


def _profiling(begin: int, end: int) -> dict[str, Any]:
    return {"profiling": {"enabled": True, "begin_on_batch": begin, "end_after_batch": end}}


STORED: dict[str, Any] = {
    "bind_mounts": [],
    "checkpoint_policy": "best",
    "data": {},
    "data_layer": {"type": "shared_fs", "container_storage_path": None},
    "debug": False,
    "description": None,
    "environment": {
        "environment_variables": {"cpu": [], "cuda": [], "rocm": []},
        "force_pull_image": False,
        "pod_spec": None,
        "ports": {},
        "proxy_ports": [],
        "registry_auth": None,
        "add_capabilities": [],
        "drop_capabilities": [],
    },
    "hyperparameters": {"width": {"type": "const", "val": 8}},
    "integrations": None,
    "internal": None,
    "labels": [],
    "log_policies": [],
    "max_restarts": 5,
    "min_checkpoint_period": {"batches": 0},
    "min_validation_period": {"batches": 0},
    "optimizations": {
        "aggregation_frequency": 1,
        "auto_tune_tensor_fusion": False,
        "average_aggregated_gradients": True,
        "average_training_metrics": True,
        "gradient_compression": False,
        "grad_updates_size_file": None,
        "mixed_precision": "O0",
        "tensor_fusion_cycle_time": 1,
        "tensor_fusion_threshold": 64,
    },
    "pbs": {},
    "perform_initial_validation": False,
    "preemption_timeout": None,
    "profiling": {"enabled": False, "begin_on_batch": 0, "end_after_batch": None, "sync_timings": True},
    "project": "",
    "records_per_epoch": 0,
    "reproducibility": {"experiment_seed": 1700000000},
    "resources": {
        "devices": [],
        "is_single_node": None,
        "max_slots": None,
        "native_parallel": False,
        "priority": None,
        "resource_pool": "",
        "shm_size": None,
        "slots_per_trial": 1,
        "weight": 1,
    },
    "scheduling_unit": 100,
    "slurm": {},
    "workspace": "",
}
"""What `det experiment config` prints for a small experiment, besides its searcher and entrypoint."""

ROWS = [*_searchers(), *_lengths(), *_hyperparameters(), *_storages(), *_environment(), *_rest()]
