from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.resources import data_path
from tests.cli.conftest import Command
from tests.facts import each_names, unnamed

SMALL = data_path("conf") / "template/small.yaml"
TEXT = """
max_restarts: 3
environment: {environment_variables: [HF_TOKEN=geheim, A=1]}
hyperparameters: {note: '1e-3'}
"""
SHOWN = """\
max_restarts: 3
environment:
  environment_variables:
  - HF_TOKEN=********
  - A=1
hyperparameters:
  note: '1e-3'
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def stored(root: Path) -> Path:
    return root / "conf/template/mine.yaml"


def test_a_template_is_set_updated_and_removed(hpc_det: Command, file: Path, stored: Path) -> None:
    assert hpc_det("template", "set", "mine", file).succeeds("Set", "mine")
    assert hpc_det("tpl", "set", "mine", file).succeeds("Updated", "mine")
    assert stored.read_text() == TEXT
    assert hpc_det("tpl", "rm", "mine").succeeds("mine")
    assert not stored.exists()


def test_the_list_says_whose_they_are(hpc_det: Command, file: Path, stored: Path) -> None:
    hpc_det("template", "set", "mine", file)
    (stored.parent / "small.yaml").write_text("max_restarts: 1\n")
    assert hpc_det("template", "list").out.splitlines() == [
        "NAME   FROM  HIDES",
        "mine   user  -",
        "small  user  hpc_det",
    ]
    mine, small = json.loads(hpc_det("template", "list", "--json").out)
    assert mine == {"name": "mine", "from": "user", "file": str(stored), "hides": []}
    assert small["hides"] == [{"from": "hpc_det", "file": str(SMALL)}]


def test_removing_the_own_one_says_what_the_name_stands_for_now(hpc_det: Command, stored: Path) -> None:
    stored.parent.mkdir(parents=True)
    (stored.parent / "small.yaml").write_text("max_restarts: 1\n")
    result = hpc_det("template", "remove", "small")
    assert result.succeeds("small", "hpc_det", SMALL)


def test_a_template_is_shown_without_its_secrets(hpc_det: Command, file: Path, stored: Path) -> None:
    hpc_det("template", "set", "mine", file)
    assert hpc_det("template", "describe", "mine") == (0, f"# mine: user ({stored})\n{SHOWN}", "")
    assert f"# mine: user ({stored})\n{SHOWN}" in hpc_det("template", "list", "-d").out
    mine, _small = json.loads(hpc_det("template", "list", "--details", "--json").out)
    assert mine["config"]["environment"] == {"environment_variables": ["HF_TOKEN=********", "A=1"]}


@pytest.mark.parametrize("option", ["-d", "--details", "--detail"])
def test_the_list_shows_settings_on_request_as_in_determined(hpc_det: Command, stored: Path, option: str) -> None:
    hidden, shown = hpc_det("template", "list"), hpc_det("tpl", "list", option)
    assert "max_restarts" not in hidden.out
    assert shown.succeeds("# small: hpc_det", "max_restarts")


@pytest.mark.parametrize("command", [["config", "check"], ["experiment", "create", "--dry-run"]])
@pytest.mark.parametrize("option", ["template", "cluster"])
def test_an_experiment_has_one_template_and_one_cluster(
    hpc_det: Command, config: Path, code: Path, option: str, command: list[str]
) -> None:
    names = [f"--{option}=first", f"--{option}=second"]
    assert hpc_det(*command, config, code, *names).fails(2, f"--{option}", "'first'", "'second'")


@pytest.mark.integration
@pytest.mark.parametrize("option", ["template", "cluster"])
def test_so_has_a_composition(hpc_det: Command, option: str) -> None:
    names = {"template": ["small", "small"], "cluster": ["slurm", "pbs"]}[option]
    assert hpc_det("run", *(f"{option}={name}" for name in names)).fails(2, option)


def test_what_describe_shows_can_be_set_again(hpc_det: Command, file: Path, tmp_path: Path) -> None:
    file.write_text("labels: ['1e-3', '010', '12:30:00', 'yes', '~', 'ü', '0x1F', '2020-01-01']\ndata: {x: 1e-3}\n")
    hpc_det("template", "set", "mine", file)
    shown = tmp_path / "shown.yaml"
    shown.write_text(hpc_det("template", "describe", "mine").out)
    hpc_det("template", "set", "other", shown)
    mine, other, _small = json.loads(hpc_det("template", "list", "-d", "--json").out)
    assert mine["config"]["data"] == {"x": 0.001}
    assert mine["config"] == other["config"]


def test_a_broken_file_hides_no_other(hpc_det: Command, stored: Path) -> None:
    stored.parent.mkdir(parents=True)
    stored.write_text("a: [1\n")
    result = hpc_det("template", "list", "-d")
    assert result.code == 0
    assert f"# {stored}:2: a bracket is not closed" in result.out
    assert "# small: hpc_det" in result.out
    broken, small = json.loads(hpc_det("template", "list", "-d", "--json").out)
    assert (broken["config"], small["config"]["max_restarts"]) == (None, 2)
    assert broken["problem"].startswith(str(stored))


def test_a_wrong_file_is_told_and_nothing_is_stored(hpc_det: Command, root: Path, file: Path) -> None:
    file.write_text("max_restart: 3\nscheduling_unit: many\n")
    result = hpc_det("template", "set", "mine", file)
    assert (result.code, result.out) == (2, "")
    each_names(
        sorted(result.err.splitlines()),
        [file, "max_restart", "'max_restart'", "'max_restarts'"],
        [file, "scheduling_unit", "'many'", 1],
    )
    assert not root.exists()


@pytest.mark.parametrize("arguments", [["describe", "smal"], ["remove", "smal"]])
def test_an_unknown_name_names_the_nearest(hpc_det: Command, arguments: list[str]) -> None:
    assert hpc_det("template", *arguments).fails(2, "template", "'smal'", "'small'")


@pytest.mark.integration
@pytest.mark.parametrize("way", ["file", "hydra"])
def test_a_template_that_goes_changes_no_experiment(
    hpc_det: Command,
    root: Path,
    config: Path,
    code: Path,
    file: Path,
    slurm_commands: Callable[[str, str], None],
    way: str,
) -> None:
    slurm_commands("sbatch", "echo 4711")
    hpc_det("template", "set", "mine", file)
    if way == "file":
        created = hpc_det("experiment", "create", config, code, "--cluster", "slurm", "--template", "mine")
    else:
        created = hpc_det("run", "experiment=digits", "cluster=slurm", "template=mine")
    assert created.out == "Created experiment 1\n"
    files = [path for path in (root / "experiments/1").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    assert json.loads((root / "experiments/1/effective.json").read_text())["max_restarts"] == 3
    file.write_text("max_restarts: 9\n")
    hpc_det("template", "set", "mine", file)
    hpc_det("template", "remove", "mine")
    assert {path: path.read_bytes() for path in files} == before


@pytest.mark.parametrize("way", ["file", "hydra"])
def test_a_template_names_no_template(hpc_det: Command, config: Path, code: Path, stored: Path, way: str) -> None:
    stored.parent.mkdir(parents=True)
    stored.write_text("template: small\n")
    if way == "file":
        result = hpc_det("experiment", "create", config, code, "--template", "mine", "--dry-run")
    else:
        result = hpc_det("run", "experiment=digits", "template=mine", "--dry-run")
    assert (result.code, result.out) == (2, "")
    assert not unnamed(result.err, "'mine'", "'small'")


def test_a_new_template_takes_no_name_that_is_taken(hpc_det: Command, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "a100.yaml"
    file.write_text("max_restarts: 2\n")
    assert hpc_det("template", "create", "a100", file).succeeds("a100")
    told = hpc_det("template", "create", "a100", file)
    remedy = f"replace it with `hpc-det template set a100 {file}`"
    assert told.fails(2, "'a100'", remedy)
