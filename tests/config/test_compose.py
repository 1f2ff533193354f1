from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

import pytest
import yaml

from hpc_det.config import interpolation
from hpc_det.config.fields import Length
from hpc_det.config.request import from_hydra
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section, sections_in
from hpc_det.errors import UsageError
from hpc_det.plan.effective import effective
from hpc_det.resources import data_path
from tests.facts import each_names, golden, refused

BOMB = "\n".join(["a0: &a0 [x]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(9))])
UserFile = Callable[[str, Any], Path]
DIGITS = ["experiment=digits", "entrypoint=python3 -m train"]


def skeleton(*kinds: type[Section]) -> dict[str, Any]:
    """Return a tree with every key of all kinds of a section, null for values and maps for subsections."""
    fields = {field.alias or name: field for kind in kinds for name, field in kind.model_fields.items()}
    below = {
        key: [*sections_in(field.annotation)]
        for key, field in fields.items()
        if get_origin(field.annotation) is not list
    }
    return {key: skeleton(*below[key]) if below.get(key) else None for key in fields}


def test_the_skeleton_has_every_key_of_an_experiment() -> None:
    written = yaml.safe_load((data_path("conf") / "config.yaml").read_text())
    del written["defaults"], written["context_dir"]
    assert written == {**skeleton(Experiment), "data": {}, "hyperparameters": {}}


def test_the_command_of_the_readme_composes(env: dict[str, str]) -> None:
    request = from_hydra(["experiment=digits", "cluster=slurm", "template=small", "resources.slots_per_trial=6"], env)
    assert request.cluster["name"] == "slurm"
    assert (request.template_name, request.template and request.template["max_restarts"]) == ("small", 2)
    assert request.config["resources"]["slots_per_trial"] == 6
    assert request.context_dir == data_path("docs/examples") / "digits"
    assert not {"cluster", "template", "context_dir", "hydra"} & request.config.keys()


def test_a_composed_experiment_is_valid_and_knows_its_origins(code: Path, env: dict[str, str]) -> None:
    result = effective(from_hydra([*DIGITS, f"context_dir='{code}'", "template=small"], env))
    assert (result.experiment.resources.slots_per_trial, result.experiment.max_restarts) == (2, 2)
    origins = {key: result.origins[key] for key in ("scheduling_unit", "max_restarts", "description")}
    assert origins == {"scheduling_unit": "config", "max_restarts": "template", "description": "default"}


def test_without_choices_it_is_the_local_cluster_no_template_and_here(env: dict[str, str]) -> None:
    request = from_hydra(["name=x"], env)
    assert (request.cluster["name"], request.template, request.template_name) == ("local", None, None)
    assert request.context_dir == Path.cwd()


def test_the_users_own_file_comes_before_the_projects(env: dict[str, str], user_file: UserFile) -> None:
    user_file("cluster/slurm.yaml", {"name": "mine"})
    user_file("template/odd.yaml", {"max_restarts": 9})
    user_file("experiment/own.yaml", "# @package _global_\nname: own\n")
    request = from_hydra(["cluster=slurm", "template=odd", "experiment=own"], env)
    assert (request.cluster, request.template, request.config["name"]) == ({"name": "mine"}, {"max_restarts": 9}, "own")
    assert from_hydra(["cluster=local"], env).cluster["name"] == "local"


@pytest.mark.integration
def test_a_length_changes_its_unit(code: Path, env: dict[str, str]) -> None:
    here = [*DIGITS, f"context_dir='{code}'"]
    plain = effective(from_hydra([*here, "min_validation_period=30"], env))
    assert plain.experiment.min_validation_period == Length(30)
    changed = from_hydra([*here, "+min_validation_period.records=30", "~min_validation_period.epochs"], env)
    assert effective(changed).experiment.min_validation_period == Length(30, "records")


WRONG_OVERRIDES: list[tuple[list[str], list[object]]] = [
    (["cluster=slrm"], ["cluster", "'slrm'", "'slurm'", "local", "pbs", "slurm"]),
    (["template=smal"], ["template", "'smal'", "'small'", "small"]),
    (["clustr=slurm"], ["clustr", "'clustr'", "'cluster'"]),
    (
        ["resources.slots_per_trail=2"],
        ["resources.slots_per_trail", "'slots_per_trail'", "'slots_per_trial'"],
    ),
    (
        ["cluster.signal_leed_s=2"],
        ["cluster.signal_leed_s", "'signal_leed_s'", "'signal_lead_s'"],
    ),
    (
        ["hyperparameters.lr=2"],
        ["hyperparameters.lr", "+hyperparameters.lr=VALUE"],
    ),
    (
        ["experiment=digits", "min_validation_period={batches: 3}"],
        ["min_validation_period", "+min_validation_period.KEY=VALUE", "~min_validation_period.KEY"],
    ),
    (["nonsense"], ["'nonsense'", "KEY=VALUE"]),
    (
        ["name=a,b"],
        ["'name=a,b'", "KEY=[a,b]", "KEY='\"a,b\"'", "-m"],
    ),
    (["+data.x=${data.nope}"], ["data.x", "'data.nope'"]),
    (["+data.x=???"], ["data.x", "x"]),
    (["cluster=null"], ["cluster=null", "NoneType"]),
    (["~nothing"], ["'nothing'"]),
]


@pytest.mark.parametrize(
    ("overrides", "facts"),
    WRONG_OVERRIDES,
)
def test_hydras_errors_are_one_sentence(overrides: list[str], facts: list[object], env: dict[str, str]) -> None:
    with pytest.raises(UsageError) as error:
        from_hydra(overrides, env)
    each_names(error.value.problems, facts)


@pytest.mark.integration
def test_the_words_for_a_wrong_override(env: dict[str, str]) -> None:
    said = []
    for overrides, _ in WRONG_OVERRIDES:
        with pytest.raises(UsageError) as error:
            from_hydra(overrides, env)
        said += error.value.problems
    assert said == golden(__file__, "overrides.txt")


def test_a_broken_file_is_named_with_its_line(env: dict[str, str], user_file: UserFile) -> None:
    file = user_file("template/broken.yaml", "a: 1\nb: [1\nc: 2\n")
    with refused(UsageError, f"{file}:3"):
        from_hydra(["template=broken"], env)


@pytest.mark.parametrize("group", ["template", "cluster", "experiment"])
def test_aliases_that_repeat_too_much_are_refused_before_hydra_reads_them(
    env: dict[str, str], user_file: UserFile, group: str
) -> None:
    file = user_file(f"{group}/bomb.yaml", f"# @package _global_\n{BOMB}")
    with pytest.raises(UsageError, match=rf"{file}:\d+: "):
        from_hydra([f"{group}=bomb"], env)


def doubled(line: str, last: int) -> str:
    """Return YAML with values below `data`, each of which repeats the one before; {0} in `line` is its reference."""
    lines = [f"  a{number}: {line.format(f'${{data.a{number - 1}}}')}" for number in range(1, last + 1)]
    return "\n".join(["# @package _global_", "data:", "  a0: x", "  n: a0", *lines])


@pytest.mark.integration
@pytest.mark.parametrize(
    "line",
    [
        '"{0}{0}"',
        '["{0}", "{0}"]',
        '{{left: "{0}", right: "{0}"}}',
        "\"${{oc.decode:'{0}'}}${{oc.decode:'{0}'}}\"",
        '"${{data.${{data.n}}}}{0}{0}"',
    ],
)
def test_interpolations_that_repeat_too_much_are_refused_with_the_key(
    env: dict[str, str], user_file: UserFile, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpolation, "MOST_REPEATED", 300)
    user_file("experiment/bomb.yaml", doubled(line, 60))
    with pytest.raises(UsageError, match=r"^data\.a\d+.*: "):
        from_hydra(["experiment=bomb"], env)


def test_so_are_long_texts(env: dict[str, str], user_file: UserFile) -> None:
    user_file("experiment/bomb.yaml", doubled('"{0}{0}{0}{0}"', 7).replace("a0: x", f"a0: {'x' * 10_000}"))
    with pytest.raises(UsageError, match=r"^data\.a\d+: "):
        from_hydra(["experiment=bomb"], env)


@pytest.mark.integration
def test_interpolations_are_otherwise_what_they_stand_for(env: dict[str, str], user_file: UserFile) -> None:
    user_file("experiment/mine.yaml", doubled('"{0}{0}"', 8))
    assert from_hydra(["experiment=mine"], env).config["data"]["a8"] == "x" * 2**8


@pytest.mark.parametrize("chosen", ["experiment=mine", "experiment=[digits,mine]"])
def test_an_experiment_below_its_own_key_is_refused(env: dict[str, str], user_file: UserFile, chosen: str) -> None:
    file = user_file("experiment/mine.yaml", "# mine\n# @package _global_\nname: mine\nentrypoint: bash a.sh\n")
    with pytest.raises(UsageError) as error:
        from_hydra([chosen, "name=other"], env)
    each_names(error.value.problems, [file, "# @package _global_"])
    file.write_text(file.read_text().removeprefix("# mine\n"))
    assert from_hydra([chosen], env).config["name"] == "mine"


def test_a_time_that_hydra_reads_as_a_number_is_refused(env: dict[str, str], user_file: UserFile) -> None:
    file = user_file("template/short.yaml", "resources:\n  time_limit: 1:30:00\n")
    with pytest.raises(UsageError) as error:
        from_hydra(["template=short"], env)
    each_names(error.value.problems, [file, "resources.time_limit", "1:30:00", 5400, "'1:30:00'"])
    user_file("template/short.yaml", "resources:\n  time_limit: '1:30:00'\n")
    assert from_hydra(["template=short"], env).template == {"resources": {"time_limit": "1:30:00"}}


def test_a_template_of_a_template_is_refused(env: dict[str, str], user_file: UserFile) -> None:
    user_file("template/big.yaml", {"template": "small"})
    with refused(UsageError, "template", "'big'", "'small'"):
        from_hydra(["template=big"], env)


@pytest.mark.integration
def test_a_request_from_a_file_needs_no_hydra() -> None:
    code = "import sys, hpc_det.plan.effective; print({'hydra', 'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
