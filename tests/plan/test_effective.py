from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_det.config.merge import leaves
from hpc_det.config.schema import Experiment
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective
from tests.facts import each_names, golden, unnamed

Build = Callable[..., Effective]
Problems = Callable[..., list[str]]


def test_a_default_never_beats_a_template(build: Build) -> None:
    result = build(template={"max_restarts": 1})
    assert (result.experiment.max_restarts, result.origins["max_restarts"]) == (1, "template")


def test_the_layers_lowest_first(build: Build) -> None:
    result = build(
        cluster={"experiment": {"max_restarts": 1, "scheduling_unit": 1, "description": "site"}},
        template={"max_restarts": 2, "scheduling_unit": 2},
        max_restarts=3,
    )
    assert (result.experiment.max_restarts, result.experiment.scheduling_unit) == (3, 2)
    keys = ("max_restarts", "scheduling_unit", "description", "checkpoint_policy")
    assert [result.origins[key] for key in keys] == ["config", "template", "cluster", "default"]


def test_every_leaf_has_an_origin_and_the_tree_is_json(build: Build) -> None:
    result = build(
        template={"labels": ["x"]}, labels=["y"], hyperparameters={"a": {"b": [1, 2], "c": None}}, data={"d": 1}
    )
    assert result.origins.keys() == dict(leaves(result.tree)).keys()
    assert json.loads(json.dumps(result.tree)) == result.tree
    assert (result.origins["labels[0]"], result.origins["labels[1]"]) == ("template", "config")
    assert result.origins["hyperparameters.a.c"] == "config"


def test_the_unit_of_a_length_has_the_origin_of_the_length(build: Build) -> None:
    result = build(template={"min_validation_period": 5}, min_checkpoint_period={"epochs": 1})
    assert result.origins["min_validation_period.batches"] == "template"
    assert result.origins["min_checkpoint_period.epochs"] == "config"


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        ({}, "auto"),
        ({"checkpoint_interval": None, "min_checkpoint_period": None}, "auto"),
        ({"min_checkpoint_period": {"batches": 7}}, "none"),
        ({"min_checkpoint_period": 0}, "none"),
        ({"min_checkpoint_period": 7, "checkpoint_interval": "auto"}, "auto"),
        ({"checkpoint_interval": "none"}, "none"),
    ],
)
def test_checkpoints_come_as_often_as_loses_least_unless_somebody_says_how_often(
    build: Build, given: dict[str, Any], interval: str
) -> None:
    result = build(**given)
    assert result.tree["checkpoint_interval"] == interval
    assert result.origins["checkpoint_interval"] == ("config" if given.get("checkpoint_interval") else "default")
    assert build(**result.tree).tree == result.tree, "the stored tree has the same meaning"


COMPAT = "HPC_DET_COMPAT=determined"
VARIABLES = "environment.environment_variables"


@pytest.mark.parametrize(
    "entrypoint",
    [
        "model_def:MyTrial",
        "python3 -m determined.launch.torch_distributed --trial model_def:MyTrial",
        ["python3", "-m", "determined.launch.torch_distributed", "python3", "-m", "train"],
        "bash -c 'python3 -m determined.launch.torch_distributed python3 -m train'",
        "pip install x && python3 -m determined.launch.torch_distributed -- bash run.sh",
    ],
)
def test_an_entrypoint_in_determineds_spelling_switches_its_names_on(build: Build, entrypoint: Any) -> None:
    result = build(entrypoint=entrypoint)
    assert result.experiment.environment.variables("cpu") == [COMPAT]
    assert result.origins[f"{VARIABLES}[0]"] == "entrypoint"


@pytest.mark.parametrize("line", ["import determined as det", "from determined.pytorch import PyTorchTrial"])
def test_a_trial_that_imports_determined_switches_its_names_on(build: Build, code: Path, line: str) -> None:
    (code / "model_def.py").write_text(f"try:\n    {line}\nfinally:\n    pass\nMyTrial = 1\n")
    assert build().experiment.environment.variables("cpu") == [COMPAT]


def test_so_does_a_script_that_imports_determined(build: Build, code: Path) -> None:
    (code / "train.py").write_text("import determined as det\n")
    for entrypoint in ("python3 train.py --lr 0.1", ["torchrun", "train.py"]):
        assert build(entrypoint=entrypoint).experiment.environment.variables("cpu") == [COMPAT]


def test_so_does_one_that_reads_a_variable_of_determineds(build: Build, code: Path) -> None:
    (code / "train.py").write_text('import os\nprint(os.environ["DET_TRIAL_ID"])\n')
    (code / "plain.py").write_text('import os\nprint(os.environ["HPC_DET_NUMBER"])\n')
    for entrypoint in ("python3 train.py", "python3 plain.py --seed $DET_TRIAL_SEED"):
        assert build(entrypoint=entrypoint).experiment.environment.variables("cpu") == [COMPAT]
    assert build(entrypoint="python3 plain.py").experiment.environment.variables("cpu") == []


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m hpc_det.launch.torch_distributed --trial model_def:MyTrial",
        ["model_def:MyTrial", "x"],
        "python3 -m train --note determined",
    ],
)
def test_no_other_experiment_hears_of_determined(build: Build, entrypoint: Any) -> None:
    assert build(entrypoint=entrypoint).experiment.environment.variables("cpu") == []


def test_who_wants_the_real_determined_has_the_last_word(build: Build) -> None:
    variables = ["HPC_DET_COMPAT="]
    result = build(entrypoint="model_def:MyTrial", environment={"environment_variables": variables})
    assert result.experiment.environment.variables("cpu") == [COMPAT, *variables]


def test_determineds_names_are_there_on_every_kind_of_slot(build: Build) -> None:
    result = build(entrypoint="model_def:MyTrial", environment={"environment_variables": {"cuda": ["A=1"]}})
    assert [result.experiment.environment.variables(kind) for kind in ("cpu", "gpu")] == [[COMPAT], [COMPAT, "A=1"]]


def test_a_name_of_determined_that_there_is_not_is_a_problem_or_a_note(
    build: Build, problems: Problems, code: Path
) -> None:
    entrypoint = "python3 train.py"
    (code / "train.py").write_text("import determined\nfrom determined import keras\n")
    each_names(problems(entrypoint=entrypoint), ["entrypoint", "train.py:2", "determined.keras"])
    (code / "train.py").write_text("import determined as det\n\ndef main():\n    det.keras\n")
    each_names(build(entrypoint=entrypoint).notes, ["entrypoint", "train.py:4", "determined.keras"])


def test_who_wants_the_real_determined_is_told_nothing_of_names(build: Build, code: Path) -> None:
    (code / "train.py").write_text("from determined import keras\n")
    found = build(entrypoint="python3 train.py", environment={"environment_variables": ["HPC_DET_COMPAT="]})
    assert found.notes == []


def test_a_module_is_looked_up_in_the_jobs_pythonpath(build: Build, code: Path) -> None:
    (code / "src").mkdir()
    (code / "src" / "other_def.py").touch()
    each_names(build(entrypoint="other_def:T").notes, ["entrypoint", "'other_def'", "src.other_def"])
    variables = {"environment_variables": ["PYTHONPATH=lib:src"]}
    assert build(entrypoint="other_def:T", environment=variables).notes == []


def test_a_problem_names_the_template_or_the_cluster_that_holds_it(problems: Problems) -> None:
    each_names(
        problems(
            template={"max_restart": 1, "scheduling_unit": "many"}, cluster={"experiment": {"checkpoint_policy": 3}}
        ),
        ["scheduling_unit", "'many'", "'site'", 1],
        ["checkpoint_policy", 3, "'lab'", "best", "all", "none"],
        ["max_restart", "'max_restart'", "'site'", "'max_restarts'"],
    )


def test_a_cluster_without_its_keys_is_told(problems: Problems) -> None:
    each_names(
        problems(cluster={"slot_type": None, "scheduler": None}),
        ["cluster.scheduler", "slurm", "pbs", "local"],
        ["cluster.slot_type", "gpu", "cpu"],
    )


def test_a_key_of_the_experiment_is_a_text_too(problems: Problems) -> None:
    each_names(problems(template={1: 2}), [1, "'site'"])


def test_a_sites_defaults_are_a_map(problems: Problems) -> None:
    each_names(problems(cluster={"experiment": 3}), ["cluster.experiment", 3, "'lab'"])


def test_every_problem_is_told_at_once(problems: Problems) -> None:
    found = problems(
        name="a\nb",
        max_restarts=-1,
        labels="x",
        slots=3,
        resources={"slots_per_trial": 4, "time_limit": "00:01:00"},
        hyperparameters={"global_batch_size": 2, "lr": {"type": "lgo"}},
        searcher={"max_length": {"batches": 1}},
        entrypoint="python3 x.py --trial model_def:NoTrial",
        cluster={"scheduler": "lsf"},
    )
    assert [line.split(":")[0] for line in found] == [
        "cluster.scheduler",
        "labels",
        "searcher.metric",
        "max_restarts",
        "slots",
        "name",
        "hyperparameters.lr.type",
        "hyperparameters.global_batch_size",
        "resources.time_limit",
        "entrypoint",
    ]


def test_what_nobody_wrote_is_required(problems: Problems) -> None:
    each_names(
        problems(searcher=None),
        ["searcher.metric"],
        ["searcher.max_length", 1, "{batches: 100}", 100, "batches", "records", "epochs"],
    )


@pytest.mark.parametrize("char", ["\n", "\t", "\x00", "\x1b", "\x85", "\u2028", "\u2029"])
@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("name", lambda text: {"name": text}),
        ("entrypoint", lambda text: {"entrypoint": text}),
        ("entrypoint[1]", lambda text: {"entrypoint": ["python3", text]}),
        ("labels[0]", lambda text: {"labels": [text]}),
        ("slurm.sbatch_args[0]", lambda text: {"slurm": {"sbatch_args": [text]}}),
        ("cluster.setup[0]", lambda text: {"cluster": {"setup": [text]}}),
        ("cluster.account", lambda text: {"cluster": {"account": text}}),
        ("cluster.environment_variables[0]", lambda text: {"cluster": {"environment_variables": [f"A={text}"]}}),
    ],
)
def test_control_characters_are_refused(char: str, path: str, change: Callable[[str], Any], problems: Problems) -> None:
    (problem,) = problems(**change(f"a{char}b"))
    assert not unnamed(problem, path, f"U+{ord(char):04X}")
    assert problem.isprintable()


def test_free_form_values_may_have_several_lines(build: Build, problems: Problems) -> None:
    build(data={"prompt": "a\nb", "separator": "\t"}, hyperparameters={"text": "a\nb"})
    each_names(problems(data={"prompt": "a\x1b"}), ["data.prompt", "U+001B", "'a\\x1b'"])
    assert not unnamed(problems(data={"a\nb": 1})[0], "data.a\\nb", "U+000A", "'a\\nb'")


def test_a_key_is_a_text(problems: Problems) -> None:
    each_names(problems(data={"x": {1: "a"}}), ["data.x.1", 1])


WRONG_HYPERPARAMETERS: list[tuple[dict[str, Any], list[object]]] = [
    (
        {"a": {"lr": {"type": "log", "minval": -2, "maxval": -4}}},
        ["hyperparameters.a.lr.minval", "-2", "-4", "type: const"],
    ),
    ({"k": {"type": "const"}}, ["hyperparameters.k.val"]),
    (
        {"k": {"type": "const", "val": 1, "vall": 2}},
        ["hyperparameters.k.vall", "'vall'", "'val'"],
    ),
    (
        {"global_batch_size": 0},
        ["hyperparameters.global_batch_size", 0, 1],
    ),
    (
        {"global_batch_size": {"type": "const", "val": "64"}},
        ["hyperparameters.global_batch_size", "'64'", 1],
    ),
    (
        {"global_batch_size": 3},
        ["hyperparameters.global_batch_size", 3, "resources.slots_per_trial", 4],
    ),
]


@pytest.mark.parametrize(
    ("hyperparameters", "facts"),
    WRONG_HYPERPARAMETERS,
)
def test_a_hyperparameter_that_one_trial_cannot_have(
    hyperparameters: dict[str, Any], facts: list[object], problems: Problems
) -> None:
    each_names(problems(hyperparameters=hyperparameters, resources={"slots_per_trial": 4}), facts)


def test_the_words_for_a_wrong_hyperparameter(problems: Problems) -> None:
    said = [
        line
        for hyperparameters, _ in WRONG_HYPERPARAMETERS
        for line in problems(hyperparameters=hyperparameters, resources={"slots_per_trial": 4})
    ]
    assert said == golden(__file__, "hyperparameters.txt")


def test_constants_pass(build: Build) -> None:
    build(
        hyperparameters={"a": 1, "b": {"c": [1], "d": {"type": "const", "val": 2}}, "global_batch_size": 8, "e": None}
    )


def test_a_length_in_records_needs_a_batch_size(build: Build, problems: Problems) -> None:
    each_names(
        problems(min_validation_period={"records": 500}),
        ["min_validation_period", "{records: 500}", "hyperparameters.global_batch_size"],
    )
    build(min_validation_period={"records": 500}, hyperparameters={"global_batch_size": 10})


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"resources": {"time_limit": "00:01:30"}, "cluster": {"signal_lead_s": 120}}, "resources.time_limit"),
        ({"cluster": {"time_limit": 1}}, "resources.time_limit"),
    ],
)
def test_a_time_limit_leaves_time_before_the_signal(changes: dict[str, Any], path: str, problems: Problems) -> None:
    (problem,) = problems(**changes)
    assert problem.startswith(f"{path}: ")
    assert not unnamed(problem, path, "cluster.signal_lead_s")


def test_the_experiments_time_limit_stands_for_the_clusters(build: Build) -> None:
    build(resources={"time_limit": "00:10:00"}, cluster={"time_limit": 1})


INNER_KEYS = (
    "metric max_length batches slots_per_trial time_limit environment_variables sbatch_args type cpu unheard é\n"
)
KEYS = st.sampled_from([*Experiment.model_fields, *INNER_KEYS.split(" "), "experiment_seed", "global_batch_size"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["1:00:00", "-N2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TREES = st.dictionaries(KEYS, VALUES, max_size=6)


@pytest.mark.integration
@given(template=TREES, config=TREES)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_tree_is_valid_or_told(template: dict[str, Any], config: dict[str, Any], build: Build) -> None:
    found = ["no problem"]
    try:
        build(template=template, cluster={"experiment": template}, **{**config, "data": {}})
    except UsageError as error:
        found = error.problems
    assert found
    assert all(line.isprintable() for line in found)


@pytest.mark.parametrize(
    "searcher",
    [
        {"name": "adaptive_asha", "max_trials": 4, "max_length": 100},
        {"name": "async_halving", "max_trials": 4, "max_length": 100, "num_rungs": 2},
        {"name": "optuna", "max_trials": 4},
        {"name": "custom", "max_trials": 4, "class": "mine:Search"},
    ],
)
def test_a_search_that_compares_needs_a_script_that_reports(
    problems: Problems, build: Build, code: Path, searcher: dict[str, Any]
) -> None:
    (code / "train.py").write_text("import torch")
    config = {"entrypoint": "python3 train.py"}
    (problem,) = problems(searcher={"metric": "loss", **searcher}, **config)
    assert not unnamed(problem, "searcher.name", searcher["name"], "searcher.metric", "train.py")
    for fixed in ("single", "random", "grid"):
        more = {"max_trials": 2} if fixed == "random" else {}
        build(searcher={"name": fixed, "metric": "loss", **more}, **config)
    (code / "train.py").write_text("import hpc_det.pytorch")
    build(searcher={"metric": "loss", **searcher}, **config)


def test_a_hook_whose_file_cannot_be_looked_at_is_a_note_and_no_error(build: Build) -> None:
    unusable = f"/{'x' * 300}/hook.sh"  # longer than a name may be: stat fails with ENAMETOOLONG
    notes = build(notify=[{"command": [unusable]}]).notes
    assert [note for note in notes if not unnamed(note, "notify[0].command", unusable)]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        (33, 1),
        (32, 0),
        ({"type": "categorical", "vals": [33, 33, 35]}, 2),
        ({"type": "const", "val": 33}, 1),
        ({"type": "int", "minval": 32, "maxval": 64}, 1),
    ],
)
def test_each_batch_size_that_slots_cannot_share_is_noted_once(build: Build, sizes: Any, count: int) -> None:
    notes = build(hyperparameters={"global_batch_size": sizes}, resources={"slots_per_trial": 2}).notes
    assert len([note for note in notes if note.startswith("hyperparameters.global_batch_size")]) == count


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        (34, [34, "8 records", "32 in all", "32 or 36"]),
        ({"type": "int", "minval": 32, "maxval": 64}, [33, "8 records", "32 in all", "32 or 36"]),
    ],
)
def test_the_note_on_a_batch_size_has_the_records_of_each_slot_and_of_all(
    build: Build, sizes: Any, facts: list[object]
) -> None:
    (note,) = build(hyperparameters={"global_batch_size": sizes}, resources={"slots_per_trial": 4}).notes
    assert unnamed(note, "hyperparameters.global_batch_size", "resources.slots_per_trial 4", *facts) == []


@pytest.mark.parametrize(("count", "notes"), [(2, 0), (5, 1), (7, 0), (99, 1)])
def test_of_a_grid_only_its_points_are_noted(build: Build, count: int, notes: int) -> None:
    sizes = {"type": "int", "minval": 48, "maxval": 72, "count": count}
    found = build(
        hyperparameters={"global_batch_size": sizes},
        resources={"slots_per_trial": 4},
        searcher={"name": "grid", "metric": "loss", "max_length": {"batches": 1}},
    )
    assert len([note for note in found.notes if note.startswith("hyperparameters.global_batch_size")]) == notes


@pytest.mark.parametrize(
    ("hyperparameters", "path"),
    [
        ({"deepspeed_config": "ds.json"}, "ds.json: train_batch_size"),
        (
            {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": {"train_batch_size": 14}},
            "overwrite_deepspeed_args.train_batch_size",
        ),
        ({"deepspeed_config": "ds.json", "overwrite_deepspeed_args": {"train_batch_size": 12}}, None),
        ({"deepspeed_config": "none.json"}, None),
        ({"overwrite_deepspeed_args": {"train_batch_size": [14, 12]}}, None),
        ({"overwrite_deepspeed_args": {"train_batch_size": {"type": "categorical", "vals": [[14], 12]}}}, None),
    ],
)
def test_a_batch_size_of_deepspeed_that_slots_cannot_share_is_noted(
    build: Build, code: Path, hyperparameters: Any, path: str | None
) -> None:
    (code / "ds.json").write_text('{"train_batch_size": 14}')
    notes = build(hyperparameters=hyperparameters, resources={"slots_per_trial": 4}).notes
    assert len(notes) == (path is not None)
    assert path is None or unnamed(notes[0], path, 14, "slots_per_trial 4", "12 or 16") == []


@pytest.mark.parametrize(
    ("bounds", "facts"),
    [
        ({"minval": 0.001, "maxval": 0.1}, ["1.002", "1.259", "minval: -3", "maxval: -1"]),
        ({"minval": 0.0001, "maxval": 10}, ["1e+10", "minval: -4", "maxval: 1"]),
        ({"minval": 16, "maxval": 512, "base": 2}, ["minval: 4", "maxval: 9"]),
        ({"minval": 0.2, "maxval": 0.8, "base": 10.0}, ["1.585", "6.31"]),
        ({"minval": -4, "maxval": -2}, []),
        ({"minval": -2, "maxval": 0.5}, []),
        ({"minval": 0, "maxval": 1}, []),
        ({"minval": 0.5, "maxval": 2}, []),
        ({"minval": 4, "maxval": 9, "base": 2}, []),
        ({"minval": 1, "maxval": 3}, []),
    ],
)
def test_a_log_range_whose_bounds_look_like_values_is_noted(
    build: Build, bounds: dict[str, Any], facts: list[str]
) -> None:
    found = build(
        hyperparameters={"optimizer": {"lr": {"type": "log", **bounds}}},
        searcher={"name": "random", "metric": "loss", "max_trials": 2, "max_length": {"batches": 1}},
    )
    assert len(found.notes) == bool(facts)
    assert not found.notes or unnamed(found.notes[0], "hyperparameters.optimizer.lr", *facts) == []


def test_a_script_that_defines_a_trial_and_trains_nothing_is_noted(build: Build, code: Path) -> None:
    assert "MyTrial" in (code / "model_def.py").read_text()
    notes = build(entrypoint="python3 model_def.py").notes
    assert [note for note in notes if not unnamed(note, "entrypoint", "model_def:MyTrial")] == notes != []
