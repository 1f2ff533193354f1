"""Interpolations mean the same in a file of `experiment create` and in a composition of `hpc-det run`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_det.config.interpolation import resolved
from hpc_det.config.interpolation_text import RESOLVERS
from hpc_det.config.request import Request, from_file, from_hydra, from_stored, from_tree
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.multirun import multirun_from_hydra
from hpc_det.resources import data_path
from tests.facts import each_names, refused, unnamed

UserFile = Callable[[str, Any], Path]
CONFIG: dict[str, Any] = {
    "entrypoint": "python3 -m train",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10}},
}
Read = Callable[..., Request]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PLACE": "/place", "COUNT": "3", "API_TOKEN": "hush-hush", "EMPTY_KEY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIN_TOKEN", "12345678")
    monkeypatch.delenv("NOWHERE", raising=False)


@pytest.fixture(params=["create", "run"])
def read(request: pytest.FixtureRequest, code: Path, env: dict[str, str], tmp_path: Path, user_file: UserFile) -> Read:
    """Return a function that reads an experiment file, with a template and overrides, as one of the two commands."""

    def run(tree: dict[str, Any], *overrides: str, template: dict[str, Any] | None = None) -> Request:
        if template is not None:
            user_file("template/mine.yaml", template)
        tree = {**CONFIG, **tree}
        chosen = None if template is None else "mine"
        if request.param == "create":
            file = tmp_path / "mine.yaml"
            file.write_text(yaml.safe_dump(tree))
            return from_file(file, code, overrides, chosen, None, env)
        user_file("experiment/mine.yaml", f"# @package _global_\n{yaml.safe_dump(tree)}")
        added = [f"++{override}" for override in overrides] + ["template=mine"] * (chosen is not None)
        return from_hydra(["experiment=mine", f"++context_dir='{code}'", *added], env)

    return run


AGREED: list[tuple[Any, Any]] = [
    ("${oc.env:PLACE}", "/place"),
    ("${oc.env:PLACE}/data", "/place/data"),
    ("${oc.env:NOWHERE,other}", "other"),
    ("${oc.decode:${oc.env:COUNT}}", 3),
    ("${oc.select:data.none,5}", 5),
    ("${searcher.max_length.batches}", 10),
    ("${data.text} and ${data.number}", "words and 7"),
    ("${data.tree}", {"a": 1, "b": 7}),
    ("${data.tree.b}", 7),
    ("${oc.dict.keys:data.tree}", ["a", "b"]),
    ("${.near}", 1),
    ("${labels[1]}", "y"),
    ("${hpc_det:docs/examples}", str(data_path("docs/examples"))),
    ("$PLACE", "$PLACE"),
    ("${PLACE}/x", "${PLACE}/x"),
    ("$(pwd) ${PLACE} ${oc.env:PLACE}", "$(pwd) ${PLACE} /place"),
    ("${PLACE:-/other}", "${PLACE:-/other}"),
    ("${PLACE:-${HOME}}", "${PLACE:-${HOME}}"),
    ("${PLACE%/*} ${#PLACE} ${1} ${!x} ${x[0]} ${x:0:3}", "${PLACE%/*} ${#PLACE} ${1} ${!x} ${x[0]} ${x:0:3}"),
    ("\\${oc.env:PLACE}", "${oc.env:PLACE}"),
    ("\\\\${oc.env:PLACE}", "\\/place"),
    ("a\\b ${oc.env:PLACE}", "a\\b /place"),
    ("\ue0000\ue001 ${oc.env:PLACE}", "\ue0000\ue001 /place"),
    (["${oc.env:PLACE}", {"deep": "${data.number}"}], ["/place", {"deep": 7}]),
]


@pytest.mark.integration
def test_both_commands_read_the_same(read: Read) -> None:
    data = {"text": "words", "number": "${oc.decode:'7'}", "tree": {"a": 1, "b": "${data.number}"}}
    values = {f"v{i}": written for i, (written, _) in enumerate(AGREED)} | {"near": 1}
    written = {"hyperparameters": {**values, "section": {"far": "${..near}"}}, "labels": ["x", "y"], "data": data}
    found = read(written).config["hyperparameters"]
    assert found.pop("section") == {"far": 1}
    assert found == {f"v{i}": value for i, (_, value) in enumerate(AGREED)} | {"near": 1}


@pytest.mark.integration
def test_a_value_of_the_template_or_the_cluster_can_be_used(read: Read) -> None:
    template = {"resources": {"slots_per_trial": 4}, "max_restarts": "${hyperparameters.restarts}"}
    tree = {
        "hyperparameters": {"restarts": 2, "slots": "${resources.slots_per_trial}"},
        "description": "${name} on ${cluster.name}",
        "name": "mine",
    }
    found = read(tree, template=template)
    assert found.config["hyperparameters"] == {"restarts": 2, "slots": 4}
    assert found.config["description"] == "mine on local"
    assert found.template == {"resources": {"slots_per_trial": 4}, "max_restarts": 2}


@pytest.mark.integration
def test_an_override_is_resolved_too_and_the_origin_names_the_interpolation(read: Read) -> None:
    found = effective(read({"resources": {"slots_per_trial": 1}}, "description='${oc.env:PLACE}'"))
    assert found.tree["description"] == "/place"
    assert found.origins["description"] == "config, ${oc.env:PLACE}"
    assert found.origins["resources.slots_per_trial"] == "config"


REFUSED: list[tuple[dict[str, Any], list[object]]] = [
    ({"data": {"x": "a ${nope:a}"}}, ["data.x", "'nope'", *RESOLVERS]),
    ({"data": {"x": ["${oc.env:${nope:a}}"]}}, ["data.x[0]", "'nope'"]),
    ({"data": {"x": "${hydra:runtime.cwd}"}}, ["data.x", "'hydra'"]),
    ({"data": {"x": "${oc.env:NOWHERE}"}}, ["data.x", "'NOWHERE'"]),
    ({"data": {"x": "${data.nowhere}"}}, ["data.x", "'data.nowhere'"]),
    ({"data": {"x": "${data.x}"}}, ["data.x"]),
    ({"data": {"x": "${data.}"}}, ["${data.}", "\\${...}"]),
    ({"data": {"x": "${oc.env:API_TOKEN}"}}, ["data.x", "API_TOKEN", "data.secrets"]),
    ({"entrypoint": "python3 x.py --token ${oc.env:API_TOKEN}"}, ["entrypoint", "API_TOKEN"]),
    ({"data": {"secrets": {"t": "${oc.env:API_TOKEN}"}, "x": "${data.secrets.t}"}}, ["data.x", "API_TOKEN"]),
    ({"environment": {"environment_variables": ["A=${oc.env:API_TOKEN}"]}}, ["environment_variables[0]", "API_TOKEN"]),
]

COPIES: list[dict[str, Any]] = [
    {"description": "${oc.env:'API_TOKEN'}"},
    {"description": '${oc.env:"API_TOKEN"}'},
    {"description": "${oc.env:API_${hyperparameters.k}}", "hyperparameters": {"k": "TOKEN"}},
    {"description": "${oc.decode:'${oc.env:API_TOKEN}'}"},
    {"description": "${oc.decode:'\\\\${oc.env:API_TOKEN}'}"},
    {"data": {"x": "${oc.create:${oc.env:API_TOKEN}}"}},
    {"resources": {"slots_per_trial": "${oc.env:'API_TOKEN'}"}},
    {"data": {"secrets": {"a": "${data.${oc.env:API_TOKEN}}"}}},
    {"data": {"secrets": {"a": "${oc.env:${oc.env:API_TOKEN}}"}}},
    {"data": {"secrets": {"a": "${${oc.env:API_TOKEN}:x}"}}},
    {"data": {"secrets": {"a": "${oc.decode:${oc.env:API_TOKEN}}"}, "x": "${data.secrets.a}"}},
]


@pytest.mark.parametrize("tree", COPIES)
def test_no_way_of_writing_it_shows_a_secret(tree: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        resolved(tree)
    assert "hush-hush" not in str(error.value)
    assert not unnamed(str(error.value), "API_TOKEN")


@pytest.mark.parametrize("secret", ["short", "longer-than-six", 12345678, True])
def test_a_secret_that_is_written_in_the_file_is_not_copied_into_other_keys(secret: object) -> None:
    tree = {"data": {"secrets": {"pin": secret, "same": "${data.secrets.pin}"}}}
    assert resolved(tree).tree["data"]["secrets"] == {"pin": secret, "same": secret}
    for copy in ("${data.secrets.pin}", "a ${data.secrets.same}", "${oc.dict.values:data.secrets}"):
        with pytest.raises(UsageError) as error:
            resolved({**tree, "description": copy})
        assert str(secret) not in str(error.value)
        assert not unnamed(str(error.value), "description", "data.secrets.pin")
    with refused(UsageError, "data.environment_variables[0]", "environment.environment_variables[0]"):
        resolved({"environment": {"environment_variables": [f"A_KEY={secret}"]}, "data": "${environment}"})
    with refused(UsageError, "description", "data.secrets.pin"):
        resolved({"description": "${data.secrets.pin}"}, below={"data": {"secrets": {"pin": secret}}})


@pytest.mark.parametrize("cluster", [None, "x", {"setup": [1, None], "environment_variables": 3, "experiment": []}])
def test_layers_of_any_type_are_read(cluster: object) -> None:
    assert resolved({"cluster": cluster, "template": cluster, "name": "${oc.env:PLACE}"}).tree["name"] == "/place"


@pytest.mark.parametrize("key", ["layers.0", "a[0]", "a[0].b", 1, ""])
def test_an_interpolation_may_be_below_a_key_of_any_spelling(key: object) -> None:
    tree = {"hyperparameters": {key: "${data.x}"}, "data": {key: {"c": "${data.x}"}, "x": 5}}
    assert resolved(tree).tree == {"hyperparameters": {key: 5}, "data": {key: {"c": 5}, "x": 5}}
    tree = {"data": {key: "${resources.slots_per_trial}"}, "resources": {"slots_per_trial": 2}}
    assert resolved(tree).tree["data"] == {key: 2}


@pytest.mark.integration
@pytest.mark.parametrize(("tree", "facts"), REFUSED)
def test_both_commands_refuse_the_same(read: Read, tree: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(UsageError) as error:
        read(tree)
    each_names(error.value.problems, facts)


@pytest.mark.integration
def test_a_secret_may_be_where_secrets_are_masked(read: Read) -> None:
    tree = {
        "data": {"secrets": {"token": "${oc.env:API_TOKEN}", "empty": "${oc.env:EMPTY_KEY}"}},
        "environment": {"environment_variables": ["API_TOKEN=${oc.env:API_TOKEN}", "PLACE=${oc.env:PLACE}"]},
        "checkpoint_storage": {"type": "s3", "bucket": "b", "secret_key": "${oc.env:API_TOKEN}"},
    }
    found = read(tree).config
    assert found["data"]["secrets"] == {"token": "hush-hush", "empty": ""}
    assert found["environment"]["environment_variables"] == ["API_TOKEN=hush-hush", "PLACE=/place"]


@pytest.mark.parametrize(
    ("key", "is_masked"),
    [("environment_variables", True), ("setup", True), ("account", False)],
)
def test_a_secret_in_a_cluster_profile(key: str, *, is_masked: bool) -> None:
    value: Any = "${oc.env:API_TOKEN}" if key == "account" else ["API_TOKEN=${oc.env:API_TOKEN}"]
    tree = {"cluster": {"name": "lab", key: value, "experiment": {"data": {"secrets": {"a": "${oc.env:API_TOKEN}"}}}}}
    if is_masked:
        assert resolved(tree).tree["cluster"]["experiment"]["data"]["secrets"] == {"a": "hush-hush"}
    else:
        with refused(UsageError, f"cluster.{key}", "API_TOKEN"):
            resolved(tree)


def test_a_key_that_is_not_set_has_no_value() -> None:
    with refused(UsageError, "resources.max_slots", "${resources.packed_slots}"):
        resolved({"resources": {"max_slots": "${resources.packed_slots}", "packed_slots": None}})
    assert resolved({"data": {"a": None, "b": "${data.a}"}}).tree == {"data": {"a": None, "b": None}}


@pytest.mark.integration
@pytest.mark.parametrize("key", ["searcher.smaller_is_better", "resources.slots_per_trial"])
def test_a_key_of_which_only_the_default_applies_is_not_set(read: Read, key: str) -> None:
    with pytest.raises(UsageError) as error:
        read({"description": f"${{{key}}}"})
    assert not unnamed(str(error.value), "description", key, "not set")


@pytest.mark.parametrize("text", ["open ${oc.env:PLACE", "${}", '${PLACE:-"a b"}', "\\${x%y} ${}"])
def test_what_no_interpolation_can_be_stays_in_a_file_of_create(text: str) -> None:
    assert resolved({"entrypoint": text}).tree == {"entrypoint": text.replace("\\$", "$")}


def test_a_tree_without_interpolations_is_the_same_object() -> None:
    tree = {"a": "$x", "b": [1]}
    assert resolved(tree).tree is tree


def test_the_context_directory_may_be_given_by_a_variable(
    tmp_path: Path, code: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", str(code.parent))
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "context_dir": "${oc.env:PLACE}/code"}))
    assert from_file(file, None, [], None, None, env).context_dir == code


@pytest.mark.parametrize("key", ["template", "cluster"])
def test_a_file_that_names_a_layer_is_still_refused(tmp_path: Path, code: Path, env: dict[str, str], key: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, key: "small", "data": {"x": "${oc.env:PLACE}"}}))
    with refused(UsageError, key):
        effective(from_file(file, code, [], None, None, env))


def test_a_stored_text_is_not_resolved_again_and_a_new_one_is(code: Path) -> None:
    stored = {**CONFIG, "data": {"kept": "${oc.env:PLACE} ${nope:1}", "slots": 4}}
    changes = ["data.new=${oc.env:PLACE}/${data.slots}", "data.same=${data.kept}"]
    found = from_stored(stored, {}, code, changes)
    text = "${oc.env:PLACE} ${nope:1}"
    assert found.config["data"] == {"kept": text, "slots": 4, "new": "/place/4", "same": text}
    with refused(UsageError, "--config data.slots.x", "data.slots", 4):
        from_stored(stored, {}, code, ["data.slots.x=1"])


def test_a_name_that_no_shell_reads_is_noted(build: Callable[..., Effective]) -> None:
    found = build(hyperparameters={"a": "${typo}"}, entrypoint="python3 x.py ${TMPDIR}")
    (note,) = found.notes
    assert not unnamed(note, "hyperparameters.a", "${typo}")


SHELL = [
    "for name in a b; do echo ${name} ${name[0]} ${data}; done",
    "echo ${PLACE:$x} ${x:(-3)} ${x: -3} ${PLACE:0:$n}",
]


@pytest.mark.parametrize("text", SHELL)
def test_where_a_shell_reads_the_value_names_without_a_dot_are_its_variables(text: str) -> None:
    tree = {"name": "n", "data": {"x": 1}, "description": "${name}", "entrypoint": f"{text}; ${{data.x}} ${{now:%Y}}"}
    found = resolved({**tree, "template": {"entrypoint": text}, "cluster": {"setup": [text], "name": "lab"}}).tree
    assert found["description"] == "n"
    assert re.fullmatch(re.escape(text) + r"; 1 20\d\d", found["entrypoint"])
    assert (found["template"]["entrypoint"], found["cluster"]["setup"]) == (text, [text])


def test_a_form_of_a_shell_is_noted_where_no_shell_reads_it_and_an_escaped_one_is_not(
    code: Path, env: dict[str, str]
) -> None:
    tree = {**CONFIG, "description": "${eval:1}", "hyperparameters": {"a": "\\${typo}"}, "name": "n"}
    tree["entrypoint"] = ["python3", "x.py", "${name}"]
    found = effective(from_tree(tree, code, [], None, None, env))
    notes = [note for note in found.notes if "${" in note]
    assert [note.partition(":")[0] for note in notes] == ["description", "entrypoint[2]"]
    assert found.tree["hyperparameters"] == {"a": "${typo}"}


@pytest.mark.integration
def test_a_section_of_which_nothing_is_set_is_no_key(read: Read) -> None:
    assert read({"hyperparameters": {"a": "${resources} ${slurm}"}}).config["hyperparameters"]["a"] == (
        "${resources} ${slurm}"
    )


def test_a_resolver_with_wrong_arguments_and_deep_nesting_are_usage_errors() -> None:
    with pytest.raises(UsageError) as error:
        resolved({"data": {"x": "${hpc_det:a,b}"}})
    assert "lambda" not in str(error.value)
    assert not unnamed(str(error.value), "data.x", "2")
    with refused(UsageError, "data.deep"):
        resolved({"data": {"x": "${oc.env:PLACE}", "deep": "${oc.env:X," * 300 + "}" * 300}})


def test_now_is_the_time_of_the_submission() -> None:
    found = resolved({"name": "run-${now:%Y-%m-%d_%H:%M:%S}"}).tree["name"]
    assert re.fullmatch(r"run-\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", found)


@pytest.mark.integration
def test_each_point_of_a_multirun_has_its_own_values(code: Path, env: dict[str, str], user_file: UserFile) -> None:
    tree = {**CONFIG, "data": {"lr": "${hyperparameters.lr}", "place": "${oc.env:PLACE}", "shell": "${PLACE}"}}
    user_file("experiment/mine.yaml", f"# @package _global_\n{yaml.safe_dump(tree)}")
    overrides = ["experiment=mine", f"++context_dir='{code}'", "+hyperparameters.lr=1,2"]
    found = [point.config["data"] for point in multirun_from_hydra(overrides, env).points]
    assert found == [{"lr": lr, "place": "/place", "shell": "${PLACE}"} for lr in (1, 2)]
    with refused(UsageError, "data.x", "API_TOKEN"):
        multirun_from_hydra([*overrides, "+data.x=${oc.env:API_TOKEN}"], env)
