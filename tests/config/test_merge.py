from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.config.merge import merge, merge_layers

pytestmark = pytest.mark.integration


def mount(host: str, container: str) -> dict[str, str]:
    return {"host_path": host, "container_path": container}


def test_the_layer_of_every_leaf_is_kept() -> None:
    merged = merge_layers(
        [
            ("cluster", {"max_restarts": 1, "slurm": {"sbatch_args": ["-Aacct"]}}),
            ("template", {"max_restarts": 2, "resources": {"slots_per_trial": 8}, "labels": ["x"]}),
            ("config", {"slurm": {"sbatch_args": ["-v"]}, "max_restarts": None, "labels": ["y", "x"]}),
        ]
    )
    assert merged.origins == {
        "max_restarts": "template",
        "slurm.sbatch_args[0]": "cluster",
        "slurm.sbatch_args[1]": "config",
        "resources.slots_per_trial": "template",
        "labels[0]": "template",
        "labels[1]": "config",
    }


def test_the_highest_layer_that_wrote_an_empty_value_is_kept() -> None:
    layers: list[tuple[str, dict[str, Any]]]
    layers = [("template", {"a": [], "b": {}, "c": [], "d": [1]}), ("config", {"a": [], "c": [2], "d": []})]
    assert merge_layers(layers).origins == {"a": "config", "b": "template", "c[0]": "config", "d[0]": "template"}


def test_the_layer_of_a_mount_follows_it_to_its_new_place() -> None:
    layers = [("template", {"bind_mounts": [mount("z", "/z")]}), ("config", {"bind_mounts": [mount("a", "/a")]})]
    assert merge_layers(layers).origins == {"bind_mounts[0]": "config", "bind_mounts[1]": "template"}


KEYS = st.sampled_from(["a", "b", "c", "name", "type", "searcher", "hyperparameters", "labels", "data", "environment"])
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)


def trees(*others: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    values = st.recursive(
        st.one_of(SCALARS, *others), lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
    )
    return st.dictionaries(KEYS, values, max_size=4)


ANY_TREE = trees(st.lists(SCALARS | st.dictionaries(KEYS, SCALARS, max_size=2), max_size=3))


@given(ANY_TREE)
def test_an_empty_template_changes_nothing(config: dict[str, Any]) -> None:
    assert merge({}, config) == config


@given(ANY_TREE)
def test_an_empty_config_changes_nothing(template: dict[str, Any]) -> None:
    assert merge(template, {}) == template


LISTED = st.fixed_dictionaries(
    {},
    optional={
        "labels": st.lists(st.text(max_size=2), max_size=4, unique=True),
        "bind_mounts": st.lists(
            st.builds(mount, st.sampled_from("xyz"), st.sampled_from(["/a", "/b", "/c"])), max_size=4
        ),
        "slurm": st.fixed_dictionaries({"sbatch_args": st.lists(st.text(max_size=2), max_size=3)}),
        "entrypoint": st.lists(st.text(max_size=2), min_size=1, max_size=3),
    },
)


@given(LISTED)
def test_with_itself_a_list_of_words_doubles_and_any_other_stays(tree: dict[str, Any]) -> None:
    merged = merge(tree, tree)
    for key in ("bind_mounts", "entrypoint"):
        assert merged.get(key) == tree.get(key)
    if "labels" in tree:
        assert merged["labels"] == list(dict.fromkeys(tree["labels"]))
    if "slurm" in tree:
        assert merged["slurm"]["sbatch_args"] == 2 * tree["slurm"]["sbatch_args"]


@given(LISTED, LISTED)
def test_a_merge_again_with_the_same_config_adds_to_lists_of_words_only(
    template: dict[str, Any], config: dict[str, Any]
) -> None:
    once = merge(template, config)
    twice = merge(once, config)
    words = (once.pop("slurm", None), twice.pop("slurm", None))
    assert twice == once
    if words[0] and "slurm" in config:
        assert words[1]["sbatch_args"] == words[0]["sbatch_args"] + config["slurm"]["sbatch_args"]


def shuffled(tree: Any, back: bool) -> Any:
    """Return the tree; if `back` is set, with the keys of every map in reverse order."""
    if not isinstance(tree, dict):
        return tree
    items = reversed(tree.items()) if back else tree.items()
    return {key: shuffled(value, back) for key, value in items}


@given(trees(), trees(), st.booleans(), st.booleans())
def test_the_order_of_keys_means_nothing(
    template: dict[str, Any], config: dict[str, Any], back: bool, forth: bool
) -> None:
    assert merge(shuffled(template, back), shuffled(config, forth)) == merge(template, config)


@given(trees(), trees())
def test_the_templates_keys_come_first_in_their_order(template: dict[str, Any], config: dict[str, Any]) -> None:
    assert list(merge(template, config)) == list(dict.fromkeys([*template, *config]))


@given(trees())
def test_a_tree_without_lists_merged_with_itself_is_itself(tree: dict[str, Any]) -> None:
    assert merge(tree, tree) == tree


def spoil(tree: Any) -> None:
    for child in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(child, dict | list):
            spoil(child)
    tree.clear()


@given(ANY_TREE, ANY_TREE)
def test_the_result_shares_nothing_with_its_inputs(template: dict[str, Any], config: dict[str, Any]) -> None:
    before = deepcopy((template, config))
    result = merge(template, config)
    assert (template, config) == before
    spoil(result)
    assert (template, config) == before


def scalars(tree: dict[str, Any], *path: str) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += scalars(value, *path, key)
        elif value is not None:
            found.append(((*path, key), value))
    return found


@given(trees(), trees())
def test_every_scalar_of_the_config_wins(template: dict[str, Any], config: dict[str, Any]) -> None:
    result = merge(template, config)
    for path, value in scalars(config):
        found: Any = result
        for key in path:
            found = found[key]
        assert found == value
