"""The functions overwrite_deepspeed_config and get_ds_config_from_hparams."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.pytorch.deepspeed import get_ds_config_from_hparams, overwrite_deepspeed_config
from tests.facts import each_names, refused, warned
from tests.pytorch.deepspeed.trials import AttrDict

BASE: dict[str, Any] = {
    "train_batch_size": 64,
    "gradient_clipping": None,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.999]}},
    "zero_optimization": {"stage": 1, "contiguous_gradients": True, "offload_optimizer": None},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ds_config.json"


def problems_of(source: dict[str, Any]) -> list[str]:
    with pytest.raises(TypeError) as caught:
        overwrite_deepspeed_config(BASE, source)
    assert isinstance(caught.value, UsageError)
    return caught.value.problems


# --- merge


def test_leaves_at_any_depth_are_overwritten_and_the_rest_stays() -> None:
    source = {"train_batch_size": 8, "optimizer": {"params": {"lr": 1}}, "zero_optimization": {"stage": 2}}
    merged = overwrite_deepspeed_config(BASE, source)
    assert merged["train_batch_size"] == 8
    assert merged["optimizer"] == {"type": "Adam", "params": {"lr": 1, "betas": [0.9, 0.999]}}
    assert merged["zero_optimization"] == {"stage": 2, "contiguous_gradients": True, "offload_optimizer": None}


def classes_of(value: Any) -> set[type]:
    below = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return {type(value)}.union(*map(classes_of, below))


@pytest.mark.parametrize("kind", [AttrDict, MappingProxyType])
def test_subclasses_of_dict_and_other_maps_become_dicts(kind: Callable[[Any], Any]) -> None:
    source = kind(
        {"optimizer": kind({"params": kind({"lr": 1.0, "betas": [0.8, 0.9]})}), "bf16": kind({"enabled": True})}
    )
    merged = overwrite_deepspeed_config(kind(BASE), source)
    assert merged["optimizer"] == {"type": "Adam", "params": {"lr": 1.0, "betas": [0.8, 0.9]}}
    assert classes_of(merged) == {dict, list, bool, float, int, str, type(None)}


def test_new_keys_and_sections_are_added() -> None:
    source = {"bf16": {"enabled": True}, "zero_optimization": {"overlap_comm": True}}
    merged = overwrite_deepspeed_config(BASE, source)
    assert merged["bf16"] == {"enabled": True}
    assert merged["zero_optimization"]["overlap_comm"] is True
    assert merged["zero_optimization"]["stage"] == 1


def test_a_section_replaces_a_leaf() -> None:
    merged = overwrite_deepspeed_config(BASE, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert merged["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_none_goes_with_every_type() -> None:
    merged = overwrite_deepspeed_config(BASE, {"gradient_clipping": 1.0, "train_batch_size": None})
    assert (merged["gradient_clipping"], merged["train_batch_size"]) == (1.0, None)


def test_neither_what_is_given_nor_what_is_returned_shares_anything_with_the_other() -> None:
    base, source = copy.deepcopy(BASE), {"optimizer": {"params": {"betas": [0.8, 0.9]}}, "bf16": {"enabled": True}}
    before = copy.deepcopy(source)
    merged = overwrite_deepspeed_config(base, source)
    merged["optimizer"]["params"]["betas"].append(7)
    merged["bf16"]["enabled"] = merged["zero_optimization"]["stage"] = 7
    assert (base, source) == (BASE, before)


def test_dotted_keys_are_keys_like_others() -> None:
    assert overwrite_deepspeed_config(BASE, {"csv.monitor": 1})["csv.monitor"] == 1


def test_a_dotted_key_that_looks_like_a_path_is_mentioned() -> None:
    with warned(UserWarning, "'zero_optimization.stage'", "'stage'", "'zero_optimization'") as caught:
        merged = overwrite_deepspeed_config(BASE, {"zero_optimization.stage": 3})
    assert merged["zero_optimization"]["stage"] == 1
    assert merged["zero_optimization.stage"] == 3
    assert caught[0].filename == __file__


# --- types


def test_every_wrong_type_is_named_with_both_values() -> None:
    source = {
        "train_batch_size": "8",
        "optimizer": {"type": ["Adam"], "params": {"betas": 0.9}},
        "zero_optimization": {"contiguous_gradients": 1},
    }
    facts: list[list[object]] = [
        ["deepspeed config: train_batch_size: ", "'8'", "text", 64, "number", "1.0e-3"],
        ["deepspeed config: optimizer.type: ", ["Adam"], "list", "'Adam'", "text"],
        ["deepspeed config: optimizer.params.betas: ", 0.9, "number", [0.9, 0.999], "list"],
        ["deepspeed config: zero_optimization.contiguous_gradients: ", 1, "number", True, "true or false"],
    ]
    each_names(problems_of(source), *facts)


@pytest.mark.parametrize("leaf", [3, None])
def test_a_leaf_does_not_replace_a_section(leaf: object) -> None:
    facts = ["deepspeed config: optimizer.params: ", leaf, {"lr": 0.1, "betas": [0.9, 0.999]}]
    each_names(problems_of({"optimizer": {"params": leaf}}), facts)


def test_both_arguments_have_their_types() -> None:
    with refused(TypeError, "base_ds_config", [1], "dict"):
        overwrite_deepspeed_config([1], {})  # type: ignore[arg-type]
    with refused(TypeError, "source_ds_dict", "'text'", "dict"):
        overwrite_deepspeed_config(BASE, "text")  # type: ignore[arg-type]


# --- "auto"


def test_auto_can_be_overwritten_by_any_type() -> None:
    base = {"train_batch_size": "auto", "optimizer": {"params": {"lr": "auto", "betas": "auto"}}}
    source = {"train_batch_size": 8, "optimizer": {"params": {"lr": 0.1, "betas": [0.9, 0.99]}}}
    assert overwrite_deepspeed_config(base, source) == source


def test_auto_that_is_left_where_deepspeed_needs_a_value_is_refused() -> None:
    base = {"train_batch_size": "auto", "gradient_clipping": 1.0, "scheduler": {"params": {"warmup_num_steps": "auto"}}}
    with pytest.raises(UsageError) as caught:
        overwrite_deepspeed_config(base, {"gradient_clipping": "auto"})
    paths = ("train_batch_size", "gradient_clipping", "scheduler.params.warmup_num_steps")
    facts = [[f"deepspeed config: {path}: ", "'auto'", "Transformers"] for path in paths]
    each_names(caught.value.problems, *facts)


def test_auto_where_deepspeed_has_a_default_is_left_to_it() -> None:
    base = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    assert overwrite_deepspeed_config(base, {}) == base


# --- files


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_read_as_deepspeed_reads_it(file: Path, kind: type) -> None:
    file.write_text('{"train_batch_size": 8,  # over all slots\n "fp16": {"enabled": false},}')
    merged = overwrite_deepspeed_config(kind(file), {"train_batch_size": 16})
    assert merged == {"train_batch_size": 16, "fp16": {"enabled": False}}
    assert type(merged["fp16"]) is dict


def test_keys_that_a_file_has_twice_are_named(file: Path) -> None:
    file.write_text('{"steps_per_print": 8, "optimizer": {"type": "Adam", "type": "Lamb"}, "steps_per_print": 8}')
    with refused(UsageError, f"{file}: ", "'type'", "'steps_per_print'"):
        overwrite_deepspeed_config(file, {})


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(UsageError, "deepspeed config gone.json: ", os.strerror(errno.ENOENT), tmp_path):
        overwrite_deepspeed_config("gone.json", {})


def test_what_is_no_json_is_refused_with_the_place(file: Path) -> None:
    file.write_text('{"train_batch_size": ')
    with refused(UsageError, f"{file}: ", "JSON", "line 1 column 22"):
        overwrite_deepspeed_config(file, {})
    file.write_text("[1, 2]")
    with refused(UsageError, f"{file}: ", [1, 2], "JSON object"):
        overwrite_deepspeed_config(file, {})


# --- hyperparameters


def test_hyperparameters_name_the_file_and_what_goes_over_it(file: Path) -> None:
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
    hparams = {
        "deepspeed_config": file.name,
        "overwrite_deepspeed_args": {"zero_optimization": {"stage": 2}},
        "learning_rate": 0.1,
    }
    expected = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    assert get_ds_config_from_hparams(hparams, file.parent) == expected
    assert get_ds_config_from_hparams({"deepspeed_config": str(file)})["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(
    ("hparams", "facts"),
    [
        ({"learning_rate": 0.1}, ["hyperparameters.deepspeed_config: ", "missing"]),
        ({"deepspeed_config": 3}, ["hyperparameters.deepspeed_config: ", 3]),
        (
            {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": [1]},
            ["hyperparameters.overwrite_deepspeed_args: ", [1], "ds.json"],
        ),
    ],
)
def test_hyperparameters_without_what_it_takes_are_refused(hparams: dict[str, Any], facts: list[object]) -> None:
    with refused(UsageError, *facts):
        get_ds_config_from_hparams(hparams)
