from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.determined_stored import imported
from hpc_det.config.interpolation import texts
from hpc_det.config.merge import Tree
from hpc_det.config.plain_yaml import dump_yaml, load_yaml, parse_map
from hpc_det.config.request import from_file, from_tree
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective
from tests.facts import each_names, refused, unnamed

STORED = sorted(Path(__file__).parent.joinpath("determined").glob("stored-*.yaml"))
BY_VERSION = {file.stem.removeprefix("stored-"): file for file in STORED}


@pytest.fixture
def read(tmp_path: Path, code: Path, env: dict[str, str]) -> Callable[[Tree], Effective]:
    """Return a function from a configuration to what it means on this machine."""

    def run(tree: Tree) -> Effective:
        file = tmp_path / "read.yaml"
        file.write_text(dump_yaml(tree))
        return effective(from_file(file, code, [], None, None, env))

    return run


@pytest.mark.parametrize("file", STORED, ids=BY_VERSION)
def test_a_stored_configuration_is_accepted_with_one_note_for_all_defaults(
    file: Path, code: Path, env: dict[str, str]
) -> None:
    found = effective(from_file(file, code, [], None, None, env))
    (note,) = [line for line in found.notes if line.startswith("description, ") or ", debug" in line]
    assert not unnamed(note, "debug", "project", "workspace", "resources.weight", "environment.ports")
    assert not unnamed(note, "optimizations.tensor_fusion_cycle_time")
    others = [line for line in found.notes if line != note and "environment.image" not in line]
    assert len(others) <= 3, others


@pytest.mark.parametrize("file", STORED, ids=BY_VERSION)
def test_an_imported_configuration_means_the_same(
    file: Path, code: Path, env: dict[str, str], read: Callable[[Tree], Effective]
) -> None:
    stored = effective(from_file(file, code, [], None, None, env)).tree
    now = read(imported(load_yaml(file), "stored").tree).tree
    # Not the same on purpose: what has no effect, masks, and defaults whose place another value of ours takes.
    other = {"resources", "optimizations", "environment", "checkpoint_storage", "checkpoint_interval"}
    other |= {"hyperparameters", "project", "workspace", "records_per_epoch"}
    assert {key: now[key] for key in now if key not in other} == {key: stored[key] for key in now if key not in other}
    assert now["resources"] == {**stored["resources"], "agent_label": None}


@pytest.mark.parametrize("file", STORED, ids=BY_VERSION)
def test_importing_the_result_again_changes_nothing(file: Path) -> None:
    once = imported(load_yaml(file), "stored").tree
    again = imported(parse_map(dump_yaml(once), "once"), "once")
    assert (again.tree, again.dropped, again.defaults, again.renamed) == (once, {}, [], {})
    assert list(again.tree) == list(once)


def test_only_what_differs_from_the_defaults_is_left() -> None:
    found = imported(load_yaml(BY_VERSION["0.38.1"]), "stored")
    assert found.tree == {
        "name": "digits",
        "labels": ["digits"],
        "entrypoint": "python3 -m determined.launch.torch_distributed --trial model_def:MyTrial",
        "hyperparameters": {
            "global_batch_size": 64,
            "learning_rate": {"type": "log", "base": 10.0, "minval": -4, "maxval": -1},
            "model": {"dropout": {"type": "double", "minval": 0.2, "maxval": 0.8}, "layers": [32, 64]},
            "optimizer": {"type": "categorical", "vals": ["adam", "sgd"]},
        },
        "searcher": {
            "name": "adaptive_asha",
            "metric": "validation_loss",
            "max_length": {"epochs": 20},
            "max_trials": 8,
        },
        "resources": {"slots_per_trial": 2, "shm_size": 2**32},
        "min_validation_period": {"epochs": 1},
        "reproducibility": {"experiment_seed": 1700000000},
        "environment": {"environment_variables": ["NCCL_DEBUG=INFO"]},
        "bind_mounts": [{"host_path": "/data", "container_path": "/data", "read_only": True}],
        "checkpoint_storage": {"type": "shared_fs", "host_path": "/", "storage_path": "tmp"},
    }
    assert found.renamed == dict.fromkeys(["searcher.time_metric", "searcher.max_time"], "searcher.max_length")
    assert list(found.dropped) == ["environment.image"]
    assert {"debug", "project", "scheduling_unit", "log_policies", "min_checkpoint_period"} <= set(found.defaults)
    assert not {"searcher.metric", "environment.environment_variables", "hyperparameters"} & set(found.defaults)


def test_what_has_no_effect_and_masks_are_dropped_with_a_reason() -> None:
    found = imported(load_yaml(BY_VERSION["0.19.11"]), "stored")
    assert found.dropped.keys() == {
        "records_per_epoch",
        "environment.registry_auth",
        "checkpoint_storage.access_key",
        "checkpoint_storage.secret_key",
        "environment.image",
    }
    assert found.tree["checkpoint_storage"] == {"type": "s3", "save_trial_latest": 2, "bucket": "checkpoints"}
    assert found.tree["searcher"]["max_concurrent_trials"] == 0
    assert "environment" not in found.tree


BASE: dict[str, Any] = {"entrypoint": "python3 x.py", "searcher": {"name": "single", "metric": "a"}}


@pytest.mark.parametrize(
    ("written", "result"),
    [
        ({"resources": {"slots": 3, "slots_per_trial": 4}}, {"resources": {"slots_per_trial": 4}}),
        (
            {"resources": {"devices": ["/a:/b"]}},
            {"resources": {"devices": [{"host_path": "/a", "container_path": "/b"}]}},
        ),
        ({"environment": {"image": {"cpu": "i", "gpu": "i"}}}, {"environment": {"image": {"cpu": "i", "cuda": "i"}}}),
        ({"environment": {"image": dict.fromkeys(["cpu", "cuda", "rocm"], "i")}}, {"environment": {"image": "i"}}),
        (
            {"environment": {"environment_variables": ["A_KEY=********", "B=1"]}},
            {"environment": {"environment_variables": ["B=1"]}},
        ),
        ({"hyperparameters": {"a": {"type": "const", "val": {"b": 1}}}},) * 2,
        (
            {"hyperparameters": {"a": {"type": "const", "val": None}, "b": {}}},
            {"hyperparameters": {"a": None, "b": {}}},
        ),
        (
            {"log_policies": [{"pattern": "x", "action": {"type": "exclude_node"}}]},
            {"log_policies": [{"pattern": "x", "action": "exclude_node"}]},
        ),
        ({"context_dir": "/code", "checkpoint_interval": "none"},) * 2,
        ({"min_validation_period": 0}, {}),
    ],
)
def test_a_key_is_written_as_hpc_det_writes_it(written: dict[str, Any], result: dict[str, Any]) -> None:
    found = imported({**BASE, **written}, "stored").tree
    assert found == {**BASE, **result}
    assert imported(found, "again").tree == found


TEXTS = [
    "for name in a b; do echo ${name} ${name[0]} ${lr:x} ${x:-${data.y}}; done",
    "${data} ${data.x} ${oc.env:HOME} ${HOME} ${{ a }} ${",
    r"\${name} \\${name} \\\${data.x} a\b ${typo} ${a:-\${name}} \\${HOME} \\${PLACE:-x}",
    "lr ${oc.env:${data.x}}",
]


@pytest.mark.parametrize("key", ["entrypoint", "description"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_that_looks_like_an_interpolation_stays_text(key: str, text: str, code: Path, env: dict[str, str]) -> None:
    tree = {**BASE, key: text, "name": "n", "data": {"x": 1, "list": [text]}}
    found = imported(tree, "stored")
    again = from_tree(found.tree, code, [], None, None, env).config
    assert {name: again[name] for name in tree} == tree
    assert found.escaped == [path for path, written in texts(found.tree) if "\\${" in written]


def test_what_hpc_det_leaves_alone_is_not_escaped() -> None:
    tree = {**BASE, "entrypoint": "echo ${name} ${HOME} ${x:-1}", "description": "${HOME}"}
    assert imported(tree, "stored").tree == tree


@pytest.mark.parametrize("keys", [{"max_length": {"batches": 50}, "time_metric": "batches"}, {}])
def test_two_lengths_or_half_of_one_are_refused(keys: dict[str, Any]) -> None:
    searcher = {"name": "adaptive_asha", "metric": "a", "max_trials": 2, "max_time": 100, **keys}
    with refused(UsageError, "x.yaml", "searcher.", "max_length", "time_metric"):
        imported({**BASE, "searcher": searcher}, "x.yaml")


def test_what_is_invalid_is_refused_with_every_problem() -> None:
    with pytest.raises(UsageError) as error:
        imported({**BASE, "max_restarts": -1, "nam": "x", "description": "a\x00"}, "x.yaml")
    each_names(error.value.problems, ["x.yaml", "description"], ["x.yaml", "max_restarts"], ["x.yaml", "nam"])
    with refused(UsageError, "x.yaml", "entrypoint"):
        imported({"searcher": BASE["searcher"]}, "x.yaml")
