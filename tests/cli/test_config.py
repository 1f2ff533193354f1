from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from hpc_det.config.plain_yaml import load_yaml
from tests.cli.conftest import Command
from tests.facts import each_names, unnamed


def check(hpc_det: Command, config: Path, code: Path, *overrides: str) -> tuple[int, str, str]:
    options = [word for override in overrides for word in ("--config", override)]
    return hpc_det("config", "check", config, code, *options)


RATE = "hyperparameters.rate={type: double, minval: 0, maxval: 1}"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], "1 trial of 1 slot, 10 batches at most, on cluster local"),
        (
            ["searcher={name: adaptive_asha, metric: a, max_trials: 64, max_length: {epochs: 9}}", RATE],
            "64 trials of 1 slot, 9 epochs at most, on cluster local",
        ),
        (
            ["searcher.name=grid", "hyperparameters={a: {type: int, minval: 1, maxval: 3, count: 3}}"],
            "3 trials of 1 slot, 10 batches at most, on cluster local",
        ),
        (["searcher.max_length=1"], "1 trial of 1 slot, 1 batch at most, on cluster local"),
        (["entrypoint=bash x.sh", "searcher={metric: a}", "resources.slots_per_trial=2"], "1 trial of 2 slots, on"),
    ],
)
def test_a_valid_file_is_told_in_one_line(
    hpc_det: Command, root: Path, config: Path, code: Path, overrides: list[str], found: str
) -> None:
    code_, out, err = check(hpc_det, config, code, *overrides)
    assert (code_, err) == (0, "")
    assert out.startswith(f"{config}: valid: {found}")
    assert out.count("\n") == 1
    assert not root.exists()


def test_every_problem_is_told_and_nothing_else(hpc_det: Command, root: Path, config: Path, code: Path) -> None:
    result = check(hpc_det, config, code, "max_restarts=-1", "searcher.max_rungs=3", "nam=x")
    assert (result[0], result[1]) == (2, "")
    each_names(
        result[2].splitlines(),
        ["searcher.max_rungs", "'single'", "searcher.name", "adaptive_asha"],
        ["max_restarts", "-1", 0],
        ["nam", "'nam'", "'name'"],
    )
    assert not root.exists()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_slots=4", "'resources.max_slots'"),
        ("resources.metric=x", "'searcher.metric'"),
        ("searcher.max_restarts=3", "'max_restarts' at the top of the file"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_its_own(
    hpc_det: Command, config: Path, code: Path, written: str, meant: str
) -> None:
    path, _, _ = written.partition("=")
    key = path.rpartition(".")[2]
    said = f"hpc-det: {path}: unknown key {key!r} (from --config {path}); did you mean {meant}?\n"
    assert check(hpc_det, config, code, written) == (2, "", said)


def test_what_has_no_effect_is_a_note(hpc_det: Command, config: Path, code: Path) -> None:
    for arguments in (["config", "check"], ["experiment", "create", "--dry-run"]):
        result = hpc_det(*arguments, config, code, "--config", "environment.pod_spec={spec: {}}")
        assert result.code == 0
        assert unnamed(result.err, "note", "environment.pod_spec") == []


STORED = Path(__file__).parents[1] / "config" / "determined" / "stored-0.38.1.yaml"


def test_a_stored_configuration_is_imported_and_then_valid(hpc_det: Command, code: Path, tmp_path: Path) -> None:
    file = tmp_path / "digits.yaml"
    result = hpc_det("config", "import", STORED, "-o", file)
    assert (result.code, result.out) == (0, "")
    assert not unnamed(result.err, "environment.image", "searcher.max_time", "searcher.max_length")
    assert not unnamed(result.err.splitlines()[-1], "debug", "scheduling_unit", "optimizations.mixed_precision")
    checked = hpc_det("config", "check", file, code)
    assert (checked.code, checked.err.count("note: ")) == (0, 1)
    assert "resources.shm_size" in checked.err
    again = hpc_det("config", "import", file)
    assert (again.code, again.out, again.err) == (0, file.read_text(), "")


def test_a_default_in_whose_place_another_value_applies_is_noted_with_it(hpc_det: Command) -> None:
    *_, defaults = hpc_det("config", "import", STORED).err.splitlines()
    assert not unnamed(defaults, "min_checkpoint_period", "checkpoint_interval: auto")


def test_the_output_is_written_through_a_link_and_replaces_only_a_file(
    hpc_det: Command, code: Path, tmp_path: Path
) -> None:
    file, link, pipe, none = (tmp_path / name for name in ("file.yaml", "link.yaml", "pipe", "none/x.yaml"))
    file.touch()
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert hpc_det("config", "import", STORED, "-o", link).code == 0
    assert (link.readlink(), file.read_text()) == (file, hpc_det("config", "import", STORED).out)
    for wrong in (pipe, code, none):
        assert hpc_det("config", "import", STORED, "-o", wrong).fails(2, "--output", wrong)
    assert pipe.is_fifo()


def test_a_value_that_looks_like_an_interpolation_is_noted(hpc_det: Command, config: Path) -> None:
    config.write_text(config.read_text() + "description: '${name}'\n")
    result = hpc_det("config", "import", config)
    assert r"description: \${name}" in result.out
    assert not unnamed(result.err, "description", "${")


def test_a_configuration_that_is_invalid_is_not_imported(hpc_det: Command, config: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text() + "max_restarts: -1\n")
    result = hpc_det("config", "import", config, "--output", tmp_path / "x.yaml")
    assert result.fails(2, config, "max_restarts", "-1")
    assert not (tmp_path / "x.yaml").exists()


def test_a_template_and_a_cluster_count(hpc_det: Command, config: Path, code: Path) -> None:
    options = ["--cluster", "slurm", "--template", "small", "--config", "resources.slots_per_trial=3"]
    result = hpc_det("config", "check", config, code, *options)
    assert (result.code, result.out) == (2, "")
    assert not unnamed(result.err, 3, "2 slots", "'slurm'")


@pytest.mark.parametrize(
    "wrong",
    [
        "searcher.source_trial_id=3/1",
        "environment.image=/torch.sif",
        "checkpoint_storage={type: shared_fs, host_path: /no/such/folder}",
    ],
)
def test_what_create_refuses_is_not_valid(hpc_det: Command, root: Path, config: Path, code: Path, wrong: str) -> None:
    told = check(hpc_det, config, code, wrong)
    assert told[0] == 2
    assert told == hpc_det("experiment", "create", config, code, "--dry-run", "--config", wrong)
    assert not root.exists()


@pytest.mark.parametrize("image", ["/torch.sif", "{cpu: /torch.sif}"])
def test_the_remedy_for_an_image_without_a_runtime_works(
    hpc_det: Command, config: Path, code: Path, image: str
) -> None:
    config.write_text(f"{config.read_text()}environment: {{image: {image}}}\n")
    assert not unnamed(check(hpc_det, config, code)[2], "--config environment.image=")
    assert check(hpc_det, config, code, "environment.image=")[0] == 0


def test_an_experiment_without_a_name_has_that_of_its_file(hpc_det: Command, config: Path, code: Path) -> None:
    config.write_text(config.read_text().replace("name: tiny\n", ""))
    named = config.rename(config.with_name("lenet-5.yaml"))
    out = hpc_det("experiment", "create", named, code, "--dry-run", "--explain").out
    assert any(line.split() == ["#", "name:", '"lenet-5"', "(default)"] for line in out.splitlines())


@pytest.mark.integration
@pytest.mark.parametrize("of", [[], ["experiment"], ["cluster"]])
def test_a_schema_is_json_schema(hpc_det: Command, of: list[str]) -> None:
    result = hpc_det("schema", *of)
    assert (result.code, result.err) == (0, "")
    Draft202012Validator.check_schema(json.loads(result.out))


def test_the_schema_is_that_of_an_experiment_file(hpc_det: Command, config: Path) -> None:
    validator = Draft202012Validator(json.loads(hpc_det("schema").out))
    assert validator.is_valid(load_yaml(config))
    assert not validator.is_valid({**load_yaml(config), "max_restarts": "5"})
