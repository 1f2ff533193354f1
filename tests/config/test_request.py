from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hpc_det.config.conf_files import conf_folders, find
from hpc_det.config.request import Request, apply_override, for_test, from_file, on_one_slot
from hpc_det.errors import UsageError
from hpc_det.plan.effective import effective
from hpc_det.resources import data_path
from tests.facts import each_names, refused, unnamed

UserFile = Callable[[str, Any], Path]
CONFIG = """
name: tiny
entrypoint: python3 -m train
searcher: {metric: loss, max_length: {batches: 10}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG)
    return file


def test_a_file_is_read_with_its_cluster_and_template(config: Path, code: Path, env: dict[str, str]) -> None:
    request = from_file(config, code, ["resources.slots_per_trial=6"], "small", "slurm", env)
    assert request.config["resources"] == {"slots_per_trial": 6}
    assert request.cluster["slots_per_node"] == 2
    assert (request.template_name, request.context_dir) == ("small", code)
    result = effective(request)
    assert (result.origins["max_restarts"], result.origins["resources.slots_per_trial"]) == ("template", "config")


def test_without_choices_it_is_the_local_cluster_no_template_and_here(config: Path, env: dict[str, str]) -> None:
    request = from_file(config, None, [], None, None, env)
    assert (request.cluster["name"], request.template, request.context_dir) == ("local", None, Path.cwd())


def test_the_argument_beats_the_files_context_dir(config: Path, code: Path, env: dict[str, str]) -> None:
    config.write_text(f"{CONFIG}\ncontext_dir: {code}/inside\n")
    assert from_file(config, None, [], None, None, env).context_dir == code / "inside"
    request = from_file(config, code, [], None, None, env)
    assert request.context_dir == code
    assert "context_dir" not in request.config


def test_a_context_dir_that_is_no_folder_is_a_problem(config: Path, tmp_path: Path, env: dict[str, str]) -> None:
    with refused(UsageError, "context_dir", tmp_path / "none"):
        effective(from_file(config, tmp_path / "none", [], None, None, env))


def test_a_file_that_is_a_pipe_is_read_once(tmp_path: Path, code: Path, env: dict[str, str]) -> None:
    pipe = tmp_path / "tiny.yaml"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=(f"{CONFIG}max_restarts: -1\n",))
    writer.start()
    with refused(UsageError, "max_restarts", f"{pipe}:5"):
        effective(from_file(pipe, code, [], None, None, env))
    writer.join()


def test_an_empty_file_is_enough_if_the_profile_has_the_settings(
    config: Path, env: dict[str, str], user_file: UserFile
) -> None:
    config.write_text("# see the profile\n")
    with refused(UsageError, config, "entrypoint"):
        from_file(config, None, [], None, None, env)
    profile = {"name": "site", "scheduler": "local", "slots_per_node": 1, "slot_type": "cpu", "max_nodes": 1}
    user_file("cluster/site.yaml", profile | {"experiment": {"entrypoint": "true", "searcher": {"metric": "loss"}}})
    assert from_file(config, None, [], None, "site", env).config == {}


def test_the_digits_example_is_a_plain_file_too(code: Path, env: dict[str, str]) -> None:
    (code / "model_def.py").write_text((code / "model_def.py").read_text().replace("MyTrial", "DigitsTrial"))
    result = effective(from_file(data_path("conf") / "experiment/digits.yaml", code, [], "small", "local", env))
    assert (result.experiment.name, result.experiment.scheduling_unit, result.experiment.max_restarts) == (
        "digits",
        10,
        2,
    )


@pytest.mark.parametrize(
    ("override", "tree"),
    [
        ("a=1", {"a": 1, "b": {"c": 1}}),
        ("b.c=x y", {"b": {"c": "x y"}}),
        ("b.d.e=[1, 2]", {"b": {"c": 1, "d": {"e": [1, 2]}}}),
        ("b=", {"b": None}),
        ("b={d: 0.5}", {"b": {"d": 0.5}}),
        ("a=b=c", {"a": "b=c", "b": {"c": 1}}),
    ],
)
def test_an_override_sets_one_yaml_value(override: str, tree: dict[str, Any]) -> None:
    config: dict[str, Any] = {"b": {"c": 1}}
    apply_override(config, override)
    assert config == tree


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("a", ["--config", "KEY=VALUE"]),
        ("=1", ["--config", "=1", "KEY=VALUE"]),
        ("a..b=1", ["--config", "a..b=1", "KEY=VALUE"]),
        ("b.c.d=1", ["--config", "b.c.d", "b.c", 1]),
        ("b=[1", ["--config", "b:1", "bracket", "]"]),
    ],
)
def test_a_wrong_override_is_told(override: str, facts: list[object]) -> None:
    with pytest.raises(UsageError) as error:
        apply_override({"b": {"c": 1}}, override)
    assert not unnamed(str(error.value), *facts)


def test_the_users_own_file_comes_before_the_projects(env: dict[str, str], user_file: UserFile) -> None:
    mine = user_file("cluster/slurm.yaml", {"name": "mine"})
    assert find("cluster", "slurm", env) == mine
    assert find("cluster", "local", env) == data_path("conf") / "cluster/local.yaml"


def test_a_user_without_files_has_the_projects(env: dict[str, str]) -> None:
    assert conf_folders(env) == [("hpc_det", data_path("conf"))]


def test_an_unknown_name_names_the_nearest_and_the_known(
    config: Path, env: dict[str, str], user_file: UserFile
) -> None:
    user_file("template/big.yaml", {})
    with pytest.raises(UsageError) as error:
        from_file(config, None, [], "smal", None, env)
    each_names(error.value.problems, ["template", "'smal'", "'small'", "big", "small"])


@pytest.mark.parametrize("name", ["../cluster/local", "/etc/passwd", ""])
def test_a_name_is_no_path(name: str, env: dict[str, str]) -> None:
    with refused(UsageError, "template", repr(name)):
        find("template", name, env)


def test_a_template_of_a_template_is_refused(config: Path, env: dict[str, str], user_file: UserFile) -> None:
    user_file("template/big.yaml", {"template": "small"})
    with refused(UsageError, "template", "'big'", "'small'"):
        from_file(config, None, [], "big", None, env)


# --- the modes


def requested(config: dict[str, Any], code: Path, template: dict[str, Any] | None = None) -> Request:
    return Request(
        cluster={"name": "local", "scheduler": "local", "slots_per_node": 2, "slot_type": "cpu"},
        template=template,
        template_name="site" if template else None,
        config={"name": "tiny", "entrypoint": "python3 -m train", "searcher": {"metric": "loss"}, **config},
        context_dir=code,
    )


def test_a_test_is_one_batch_whatever_was_asked_for(code: Path) -> None:
    asked = {
        "searcher": {"metric": "loss", "max_length": {"epochs": 5}},
        "scheduling_unit": 100,
        "min_validation_period": {"epochs": 1},
        "min_checkpoint_period": {"records": 7},
        "perform_initial_validation": True,
        "max_restarts": 3,
        "checkpoint_storage": {"save_trial_best": 2, "save_experiment_best": 3, "save_trial_latest": 4},
    }
    result = effective(for_test(requested(asked, code, template={"max_restarts": 4, "scheduling_unit": 50})))
    assert result.tree["searcher"]["max_length"] == {"batches": 1}
    assert result.tree["min_validation_period"] == result.tree["min_checkpoint_period"] == {"batches": 0}
    assert (result.experiment.scheduling_unit, result.experiment.max_restarts) == (1, 0)
    assert result.experiment.perform_initial_validation is False
    assert set(result.tree["checkpoint_storage"].values()) == {0, None}


@pytest.mark.parametrize(
    ("mine", "templates", "expected"),
    [
        (None, None, "[test-mode]"),
        ("six digits", None, "[test-mode] six digits"),
        (None, "the site's", "[test-mode] the site's"),
        ("six digits", "the site's", "[test-mode] six digits"),
    ],
)
def test_a_test_is_marked_in_its_description(
    code: Path, mine: str | None, templates: str | None, expected: str
) -> None:
    request = requested({"description": mine}, code, template={"description": templates})
    assert effective(for_test(request)).experiment.description == expected
    assert request.config["description"] == mine


@pytest.mark.parametrize("variables", [["COLOR=blue"], {"cpu": ["COLOR=blue"], "cuda": ["COLOR=green"]}])
def test_the_ranks_of_a_test_learn_it_beside_their_own_variables(code: Path, variables: Any) -> None:
    result = effective(for_test(requested({"environment": {"environment_variables": variables}}, code)))
    assert result.experiment.environment.variables("cpu") == ["COLOR=blue", "HPC_DET_TEST=1"]


@pytest.mark.parametrize("asked", [{}, {"resources": {"slots_per_trial": 2}}])
def test_a_run_in_this_process_has_one_slot(code: Path, asked: dict[str, Any]) -> None:
    request = requested({**asked, "searcher": {"metric": "loss", "max_length": 10}}, code)
    result = effective(on_one_slot(request))
    assert result.experiment.resources.slots_per_trial == 1
    assert result.tree["searcher"]["max_length"] == {"batches": 10}


def test_a_run_in_this_process_needs_no_image(code: Path) -> None:
    image = {"environment": {"image": "docker://torch", "force_pull_image": False}}
    request = requested({**image, "searcher": {"metric": "loss", "max_length": 10}}, code, template=image)
    with refused(UsageError, "environment.image", "'docker://torch'", "containers.runtime"):
        effective(request)
    result = effective(on_one_slot(request))
    assert result.experiment.environment.image is None
    assert result.origins["environment.force_pull_image"] == "config"
