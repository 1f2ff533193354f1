from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_det.config.conf_files import find
from hpc_det.config.request import from_hydra
from hpc_det.config.templates import problems_of, remove_template, set_template, template, templates
from hpc_det.errors import UsageError
from hpc_det.resources import data_path
from tests.facts import each_names, golden, refused, unnamed

UserFile = Callable[[str, Any], Path]
SMALL = data_path("conf") / "template/small.yaml"


@pytest.fixture
def site_file(tmp_path: Path, env: dict[str, str]) -> UserFile:
    """Return a function that writes a file into a conf folder of the site; "one" takes precedence over "two"."""
    env["HPC_DET_SITE_CONF"] = os.pathsep.join(str(tmp_path / folder) for folder in ("one", "two"))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()

    def write(name: str, tree: Any) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(tree))
        return file

    return write


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "new.yaml"
        path.write_text(text)
        return path

    return write


File = Callable[[str], Path]


def stored(env: dict[str, str], name: str) -> Path:
    return Path(env["HPC_DET_ROOT"]) / "conf/template" / f"{name}.yaml"


# --- the owner of a template


def test_a_user_without_templates_has_the_projects(env: dict[str, str]) -> None:
    assert [(found.name, found.owner, found.file) for found in templates(env)] == [("small", "hpc_det", SMALL)]


def test_the_users_hides_the_sites_and_that_the_projects(
    env: dict[str, str], user_file: UserFile, site_file: UserFile
) -> None:
    one, two = site_file("one/template/small.yaml", {}), site_file("two/template/small.yaml", {})
    assert template("small", env).hides == (("site", two), ("hpc_det", SMALL))
    mine = user_file("template/small.yaml", {})
    found = template("small", env)
    assert (found.owner, found.file) == ("user", mine)
    assert found.hides == (("site", one), ("site", two), ("hpc_det", SMALL))


def test_clusters_and_experiments_of_the_site_are_found_too(
    code: Path, env: dict[str, str], user_file: UserFile, site_file: UserFile
) -> None:
    big = site_file("one/cluster/big.yaml", {"name": "the site's"})
    site_file("two/cluster/big.yaml", {"name": "not this one"})
    site_file("two/template/big.yaml", {"max_restarts": 7})
    (site_file("one/experiment/shared.yaml", {})).write_text("# @package _global_\nname: shared\n")
    assert find("cluster", "big", env) == big
    request = from_hydra(["cluster=big", "template=big", "experiment=shared"], env)
    assert (request.cluster, request.template) == ({"name": "the site's"}, {"max_restarts": 7})
    assert request.config["name"] == "shared"
    user_file("cluster/big.yaml", {"name": "mine"})
    assert from_hydra(["cluster=big"], env).cluster == {"name": "mine"}


# --- changing one's templates


def test_a_template_is_stored_as_it_was_written(env: dict[str, str], file: File) -> None:
    text = "# mine\nresources: {slots_per_trial: 4}  # a node\n"
    assert set_template("mine", file(text), env) is False
    assert stored(env, "mine").read_text() == text
    assert stored(env, "mine").stat().st_mode & 0o777 == 0o600
    assert template("mine", env).tree() == {"resources": {"slots_per_trial": 4}}


def test_a_name_that_is_known_stands_for_the_new_file(env: dict[str, str], file: File) -> None:
    set_template("mine", file("max_restarts: 1"), env)
    assert set_template("mine", file("max_restarts: 2"), env) is True
    assert template("mine", env).tree() == {"max_restarts": 2}
    assert [path.name for path in stored(env, "mine").parent.iterdir()] == ["mine.yaml"]


def test_a_removed_template_is_gone(env: dict[str, str], file: File) -> None:
    set_template("mine", file(""), env)
    assert remove_template("mine", env) is None
    with refused(UsageError, "template", "'mine'"):
        template("mine", env)


def test_removing_ones_own_uncovers_what_it_hid(env: dict[str, str], user_file: UserFile) -> None:
    user_file("template/small.yaml", {})
    assert remove_template("small", env) == ("hpc_det", SMALL)
    assert template("small", env).owner == "hpc_det"


def test_what_belongs_to_others_stays_as_it_is(env: dict[str, str], file: File, site_file: UserFile) -> None:
    theirs = site_file("one/template/big.yaml", {"max_restarts": 7})
    for name, owner in (("big", f"the site ({theirs})"), ("small", f"hpc_det ({SMALL})")):
        with pytest.raises(UsageError) as error:
            set_template(name, file("max_restarts: 1"), env)
        each_names(error.value.problems, [repr(name), owner])
        with pytest.raises(UsageError) as error:
            remove_template(name, env)
        each_names(error.value.problems, [repr(name), owner])
    assert template("big", env).tree() == {"max_restarts": 7}


@pytest.mark.parametrize(
    "name", ["", "../small", "a/b", ".hidden", "-x", "a b", "a.yaml", "1", "null", "True", "x\n", "é", "x" * 65]
)
def test_a_name_is_a_file_name_and_a_word_for_hydra(name: str, env: dict[str, str], file: File) -> None:
    with refused(UsageError, repr(name)):
        set_template(name, file("max_restarts: 1"), env)
    assert not Path(env["HPC_DET_ROOT"]).exists()


@pytest.mark.integration
def test_a_name_that_is_accepted_can_be_chosen_in_hydra(env: dict[str, str], file: File) -> None:
    for name in ("a", "A-1_b", "x" * 64, "nullx"):
        set_template(name, file("max_restarts: 3"), env)
        assert from_hydra([f"template={name}"], env).template_name == name


# --- checks before a template is stored


def test_every_problem_at_once_and_nothing_is_stored(env: dict[str, str], file: File) -> None:
    path = file('max_restart: 3\nscheduling_unit: many\ntemplate: small\nsearcher: {metric: 3}\nname: "a\\eb"\n')
    with pytest.raises(UsageError) as error:
        set_template("no/name", path, env)
    name, *lines = error.value.problems
    assert not unnamed(name, "'no/name'")
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert {line.removeprefix(f"{path}: ").split(":")[0] for line in lines} == {
        "max_restart",
        "scheduling_unit",
        "template",
        "searcher.metric",
        "name",
    }
    assert any("did you mean 'max_restarts'?" in line for line in lines)
    assert not Path(env["HPC_DET_ROOT"]).exists()


@pytest.mark.parametrize("text", ["- a\n", "a: [1\n", "a: 1\na: 2\n", "just text"])
def test_what_is_no_map_is_refused(text: str, env: dict[str, str], file: File) -> None:
    with refused(UsageError, "new.yaml"):
        set_template("mine", file(text), env)


def test_a_file_that_is_not_there(env: dict[str, str], tmp_path: Path) -> None:
    with refused(UsageError, "nothing.yaml"):
        set_template("mine", tmp_path / "nothing.yaml", env)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"searcher": {"metric": "loss"}},
        {"searcher": {"max_length": {"epochs": 3}, "metric": None}},
        {"searcher": None, "name": None},
        {"hyperparameters": {"global_batch_size": 64, "model": {"depth": 2}}},
        {"min_validation_period": {"records": 100}},
        {"resources": {"slots_per_trial": "${hyperparameters.slots}", "devices": ["${oc.env:DEVICE}"]}},
    ],
)
def test_what_a_template_leaves_out_may_be_missing(tree: dict[str, Any]) -> None:
    assert problems_of(tree) == []


WRONG_TEMPLATES: list[tuple[dict[str, Any], list[object]]] = [
    ({"unheard_of": None}, ["unheard_of", "'unheard_of'"]),
    ({"resources": {"slot": 2}}, ["resources.slot", "'slot'"]),
    ({"resources": 4}, ["resources", 4]),
    ({"hyperparameters": {"lr": {"type": "const"}}}, ["hyperparameters.lr.val"]),
    ({"template": None}, ["template"]),
    ({"context_dir": "."}, ["context_dir", "'context_dir'"]),
]


@pytest.mark.parametrize(
    ("tree", "facts"),
    WRONG_TEMPLATES,
)
def test_what_it_says_must_be_valid(tree: dict[str, Any], facts: list[object]) -> None:
    (line,) = problems_of(tree)
    assert not unnamed(line, *facts)


def test_the_words_for_a_wrong_template() -> None:
    assert [problem for tree, _ in WRONG_TEMPLATES for problem in problems_of(tree)] == golden(
        __file__, "templates.txt"
    )


def test_a_package_for_hydra_is_refused(env: dict[str, str], file: File) -> None:
    with refused(UsageError, "# @package"):
        set_template("mine", file("\n# @package _global_\nmax_restarts: 3\n"), env)
