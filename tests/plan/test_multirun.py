from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_det.config.compose import Composer
from hpc_det.config.request import Request, for_test, from_hydra
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.multirun import OF_A_TRIAL, Multirun, effective_multirun, multirun_from_hydra
from tests.facts import each_names, golden, unnamed

UserFile = Callable[[str, Any], Path]
Problems = Callable[..., list[str]]
FIXED = ["experiment=digits", "entrypoint=python3 -m train"]
RATE, DROPOUT = "hyperparameters.learning_rate", "hyperparameters.dropout"


@pytest.fixture
def multirun(env: dict[str, str]) -> Callable[..., Multirun]:
    """Return a function that makes the multirun of these overrides over a small experiment."""
    return lambda *overrides: multirun_from_hydra([*FIXED, *overrides], env)


@pytest.fixture
def problems(env: dict[str, str]) -> Problems:
    """Return a function that composes and validates overrides, and returns the problems."""

    def run(*overrides: str) -> list[str]:
        with pytest.raises(UsageError) as error:
            effective_multirun(multirun_from_hydra([*FIXED, *overrides], env))
        return error.value.problems

    return run


@pytest.fixture
def composes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list to which each composition appends its overrides."""
    seen: list[list[str]] = []
    compose = Composer.compose

    def counted(self: Composer, overrides: Any) -> Any:
        seen.append(list(overrides))
        return compose(self, overrides)

    monkeypatch.setattr(Composer, "compose", counted)
    return seen


def same(one: Request, other: Request) -> bool:
    """Return whether both are equal, including types: 1, 1.0 and true differ."""
    return repr(_sorted(vars(one))) == repr(_sorted(vars(other)))


def _sorted(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_sorted(item) for item in tree]
    return {key: _sorted(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


# --- the points are Hydra's


def test_the_last_axis_is_the_fastest(multirun: Callable[..., Multirun]) -> None:
    found = multirun(f"{RATE}=1e-3,1", "scheduling_unit=range(1,3)", "max_restarts=2")
    assert [point.overrides for point in found.points] == [
        (f"{RATE}=0.001", "scheduling_unit=1"),
        (f"{RATE}=0.001", "scheduling_unit=2"),
        (f"{RATE}=1", "scheduling_unit=1"),
        (f"{RATE}=1", "scheduling_unit=2"),
    ]
    values = [
        (point.config["hyperparameters"]["learning_rate"], point.config["scheduling_unit"]) for point in found.points
    ]
    assert repr(values) == "[(0.001, 1), (0.001, 2), (1, 1), (1, 2)]"
    assert {point.config["max_restarts"] for point in found.points} == {2}


def test_the_points_share_what_does_not_differ_and_disturb_no_other(multirun: Callable[..., Multirun]) -> None:
    first, second = multirun(f"{RATE}=1,2").points
    assert first.config["searcher"] is second.config["searcher"]
    assert (first.config["hyperparameters"]["learning_rate"], second.config["hyperparameters"]["learning_rate"]) == (
        1,
        2,
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        ([], 1),
        ([f"{RATE}=choice(1,2)", f"{RATE}=5,6,7"], 3),
        ([f"+{RATE}.a=1,2"], 2),
        (["+data.a.b=1,2", "+data.a.c=3,4"], 4),
        (["+data.x={a: 1},{b: 2}"], 2),
        (["+data.x={a: 1}", "+data.x.b=1,2"], 2),
        (["+data.layers=[1, 2],[3]"], 2),
        (["+data.x=${hyperparameters.dropout},3"], 2),
        ([f"{DROPOUT}=0.1,0.2", "+data.same=${hyperparameters.dropout}"], 2),
        ([f"{DROPOUT}=0.1,0.2", "+data.all=[{same: ${hyperparameters.dropout}}]"], 2),
        ([f"{DROPOUT}=null,true,'1e-3',abc,\"a,b\""], 5),
        ([f"~{DROPOUT}", f"{RATE}=1,2"], 2),
        (["+min_validation_period.records=3,4", "~min_validation_period.epochs"], 2),
        (["~hyperparameters.global_batch_size=64,64"], 2),
        (["template=small,small", "template.max_restarts=7,8"], 4),
        (["template=glob(*)", "scheduling_unit=1,2"], 2),
        (["searcher.max_length=5,10", "searcher=null"], 2),
        (["hyperparameters=null", "++hyperparameters.x=1,2"], 2),
        ([f"{RATE}=sort(3,1,2)", f"{DROPOUT}=float(range(1,3))"], 6),
    ],
)
def test_a_point_is_what_hydra_composes_of_its_overrides(
    multirun: Callable[..., Multirun], env: dict[str, str], overrides: list[str], number: int
) -> None:
    points = multirun(*overrides).points
    assert len(points) == number
    for point in points:
        swept = {override.partition("=")[0]: override for override in point.overrides}
        written = [swept.get(override.partition("=")[0], override) for override in overrides]
        assert same(point.request, from_hydra([*FIXED, *written], env)), point.overrides


values = st.one_of(
    st.integers(-3, 3),
    st.floats(-2, 2).map(lambda number: round(number, 3)),
    st.sampled_from(
        ["true", "null", "abc", "'1e-3'", "'a b'", "[1,2]", "[]", "1e-3", "nan", "inf", "${name}", "'é,\"='"]
    ),
).map(str)
keys = st.sampled_from(
    [
        RATE,
        DROPOUT,
        "+hyperparameters.new",
        "++hyperparameters.a.b",
        "+data.x.y",
        "scheduling_unit",
        "labels",
        "++data.x",
    ]
)
axes = st.dictionaries(keys, st.lists(values, min_size=1, max_size=2), min_size=1, max_size=3)


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(axes)
def test_any_sweep_is_what_hydra_composes_point_by_point(env: dict[str, str], axes: dict[str, list[str]]) -> None:
    combinations = itertools.product(*([f"{key}={value}" for value in found] for key, found in axes.items()))
    overrides = [f"{key}={','.join(found)}" for key, found in axes.items()]
    try:
        expected = [from_hydra([*FIXED, *point], env) for point in combinations]
    except UsageError:
        with pytest.raises(UsageError):
            multirun_from_hydra([*FIXED, *overrides], env)
        return
    points = multirun_from_hydra([*FIXED, *overrides], env).points
    assert len(points) == len(expected)
    assert all(same(point.request, request) for point, request in zip(points, expected, strict=True))


# --- the cost of points


@pytest.mark.integration
def test_values_are_composed_once_and_groups_once_each(
    multirun: Callable[..., Multirun], user_file: UserFile, composes: list[list[str]]
) -> None:
    for name, depth in (("a", 2), ("b", 3)):
        user_file(f"model/{name}.yaml", f"# @package hyperparameters.model\ndepth: {depth}\nwidth: {depth * 10}\n")
    points = multirun("+model=glob(*)", f"{RATE}=range(0,10)", "hyperparameters.model.width=5,6").points
    assert len(points) == 40
    assert len(composes) == 2
    assert points[0].overrides == ("+model=a", f"{RATE}=0", "hyperparameters.model.width=5")
    models = [point.config["hyperparameters"]["model"] for point in points]
    assert [models[0], models[19], models[20]] == [
        {"depth": 2, "width": 5},
        {"depth": 2, "width": 6},
        {"depth": 3, "width": 5},
    ]


def test_where_keys_are_linked_each_point_is_composed(
    multirun: Callable[..., Multirun], composes: list[list[str]]
) -> None:
    points = multirun(f"{DROPOUT}=0.1,0.2", "+data.same=${hyperparameters.dropout}").points
    assert [point.config["data"]["same"] for point in points] == [0.1, 0.2]
    assert len(composes) == 2


def test_a_link_to_a_folder_of_the_project_is_no_link_between_keys(
    multirun: Callable[..., Multirun], composes: list[list[str]]
) -> None:
    multirun(f"{DROPOUT}=0.1,0.2", "+data.folder=${hpc_det:docs/examples}")
    assert len(composes) == 1


@pytest.mark.integration
def test_a_thousand_points_take_no_longer_than_twenty_one_by_one(multirun: Callable[..., Multirun]) -> None:
    """Measured: they take as long as 3 to 8 single ones."""

    def took_s(*overrides: str, points: int) -> float:
        began = time.process_time()
        assert len(effective_multirun(multirun(*overrides)).points) == points
        return time.process_time() - began

    one_s = min(took_s(f"{RATE}=0.{number}", points=1) for number in range(1, 4))
    swept = [f"{RATE}=range(0.01,1.01,0.01)", "reproducibility.experiment_seed=range(0,10)"]
    assert took_s(*swept, points=1000) < 20 * one_s


# --- overrides that make no sweep


NO_SWEEPS: list[tuple[str, list[object]]] = [
    (
        f"{RATE}=interval(0,1)",
        [f"{RATE}=interval(0,1)", f"{RATE}=range(0,1,0.25)"],
    ),
    (
        "hydra/launcher=joblib",
        ["hydra/launcher=joblib", "hpc-det run -m", "hydra/launcher=hpc_slurm"],
    ),
    ("hydra.job.name=a,b", ["hydra.job.name=a,b"]),
    (f"{RATE}=range(3,1)", [RATE]),
    (f"{RATE}=glob(*)", [RATE]),
    ("template=glob(*),big", ["template=glob(*),big"]),
    (
        f"{RATE}=range(0,1000000000000)",
        ["--multirun", 100000],
    ),
    (
        "hyperparameters.lr=1,2",
        ["hyperparameters.lr", "+hyperparameters.lr=VALUE"],
    ),
    ("scheduling_units=1,2", ["scheduling_units", "'scheduling_units'", "'scheduling_unit'"]),
    (
        "experiment=digits,digit",
        [2, "experiment=digit", "'digit'", "'digits'"],
    ),
    (
        f"{RATE}=choice(1,null)",
        [f"{RATE}=choice(1,null)", "args[1]", "NoneType"],
    ),
]


@pytest.mark.parametrize(
    ("override", "facts"),
    NO_SWEEPS,
)
def test_what_is_no_sweep_is_told(problems: Problems, override: str, facts: list[object]) -> None:
    (line,) = problems(override)
    assert not unnamed(line, *facts)


@pytest.mark.integration
def test_the_words_for_what_is_no_sweep(problems: Problems) -> None:
    said = [line.partition(" is incompatible with ")[0] for sweep, _ in NO_SWEEPS for line in problems(sweep)]
    assert said == golden(__file__, "no_sweeps.txt")


def test_sweepers_and_launchers_are_refused_together(problems: Problems) -> None:
    assert len(problems("hydra.sweeper.max_batch_size=1", "hydra.launcher.x=2", f"{RATE}=interval(0,1)")) == 3


# --- the effective configuration of each point


@pytest.mark.integration
@pytest.mark.parametrize(
    "overrides",
    [
        [f"{RATE}=1,2", "reproducibility.experiment_seed=1,2"],
        ["searcher.max_length=5,10", "checkpoint_storage.save_trial_best=2,3", "template=small"],
        ["+data.x=1,2", "labels=[a],[b,c]", "description=a,null"],
        ["hyperparameters=null", "++hyperparameters.x.y=[1],null"],
        ["min_checkpoint_period=1,2", "optimizations.aggregation_frequency=1,2", "checkpoint_policy=all,none"],
        ["template=rich,small", f"{RATE}=null,1"],
        ["experiment=full,bare,full", "max_restarts=1,2"],
        ["experiment=bare,full", "++hyperparameters.x=1,2", "template=rich"],
    ],
)
def test_a_point_is_as_effective_as_it_is_alone(
    multirun: Callable[..., Multirun], user_file: UserFile, overrides: list[str]
) -> None:
    user_file("template/rich.yaml", {"hyperparameters": {"global_batch_size": 8, "width": 4}, "labels": ["t"]})
    user_file(
        "cluster/local.yaml",
        {
            "name": "mine",
            "scheduler": "local",
            "slots_per_node": 2,
            "slot_type": "cpu",
            "environment_variables": ["A=1"],
            "experiment": {"hyperparameters": {"site": 1}, "labels": ["s"]},
        },
    )
    bare = "# @package _global_\nname: n\nsearcher: {metric: loss, max_length: 9}\n"
    user_file("experiment/bare.yaml", bare)
    user_file(
        "experiment/full.yaml", f"{bare}data: {{x: 1}}\nlabels: [a]\nhyperparameters: {{y: 1}}\nmax_restarts: 3\n"
    )
    found = multirun(*overrides)
    result = effective_multirun(found)
    assert result.tree == effective(found.request).tree
    for point, tree in zip(found.points, result.points, strict=True):
        assert {**result.tree, **tree} == effective(point.request).tree
        assert "hyperparameters" in tree


def test_a_point_has_only_what_differs(multirun: Callable[..., Multirun]) -> None:
    result = effective_multirun(multirun("max_restarts=1,2", f"~{DROPOUT}", f"{RATE}=1"))
    hyperparameters = {"global_batch_size": 64, "learning_rate": 1}
    assert result.points == [
        {"hyperparameters": hyperparameters},
        {"hyperparameters": hyperparameters, "max_restarts": 2},
    ]


def test_points_that_differ_in_hyperparameters_are_validated_as_a_whole_once(
    multirun: Callable[..., Multirun], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Request] = []

    def counted(request: Request) -> Effective:
        seen.append(request)
        return effective(request)

    monkeypatch.setattr("hpc_det.plan.multirun.effective", counted)
    effective_multirun(multirun(f"{RATE}=range(0,20)", "scheduling_unit=1,2"))
    assert len(seen) == 1


def test_every_problem_names_its_point_and_what_all_have_stands_alone(problems: Problems) -> None:
    each_names(
        problems("hyperparameters.global_batch_size=64,1,many", "scheduling_unit=10,ten", "name=''"),
        ["name", "''"],
        [2, "hyperparameters.global_batch_size=64", "scheduling_unit=ten", "scheduling_unit", "'ten'", 1],
        [
            3,
            1,
            "hyperparameters.global_batch_size=1",
            "scheduling_unit=10",
            "hyperparameters.global_batch_size",
            "resources.slots_per_trial",
            2,
        ],
        [
            5,
            1,
            "hyperparameters.global_batch_size=many",
            "scheduling_unit=10",
            "hyperparameters.global_batch_size",
            "'many'",
        ],
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("resources.slots_per_trial=1,2", "resources.slots_per_trial"),
        ("resources.time_limit=10,20", "resources.time_limit"),
        ("name=a,b", "name"),
        ("entrypoint=a,b", "entrypoint"),
        ("searcher.metric=a,b", "searcher.metric"),
        ("environment.environment_variables=['A=1'],['A=2']", "environment.environment_variables"),
        ("cluster=local,slurm", "cluster"),
        ("+cluster.signal_lead_s=10,20", "cluster"),
        ("context_dir=/tmp,/", "context_dir"),
    ],
)
def test_the_trials_of_a_sweep_share_one_kind_of_job(problems: Problems, override: str, path: str) -> None:
    each_names(problems(override, f"{RATE}=1,2"), [path])


def test_what_may_differ_is_of_the_schema(multirun: Callable[..., Multirun]) -> None:
    tree = effective(multirun().request).tree
    for path in OF_A_TRIAL:
        section, _dot, key = path.partition(".")
        assert section in tree
        assert not key or key in tree[section]


def test_a_test_of_a_sweep_is_one_batch_of_each_point(multirun: Callable[..., Multirun]) -> None:
    result = effective_multirun(multirun(f"{RATE}=1,2", "searcher.max_length=5,10").with_requests(for_test))
    assert result.tree["searcher"]["max_length"] == {"batches": 1}
    assert all(list(point) == ["hyperparameters"] for point in result.points)
    assert [point["hyperparameters"]["learning_rate"] for point in result.points] == [1, 1, 2, 2]


@pytest.mark.integration
def test_the_effective_side_needs_no_hydra() -> None:
    code = "import sys, hpc_det.plan.multirun; print({'hydra', 'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
