"""The flags --local, --pdb and --test, as far as nothing trains yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command

NO_JOB = "--local: there is no job to show, follow or pause; leave out --dry-run, --follow and --paused"
NOWHERE = "the entrypoint 'python3 -m train' names no trial to run in this process"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pdb"], "--pdb: a job has no keyboard; add --local"),
        (["--pdb", "--test"], "--pdb: a job has no keyboard; add --local"),
        (
            ["--local", "--dry-run"],
            "--local: there is no job to show, follow or pause; leave out --dry-run, --follow and --paused",
        ),
        (
            ["--local", "--follow"],
            "--local: there is no job to show, follow or pause; leave out --dry-run, --follow and --paused",
        ),
    ],
)
def test_flags_that_contradict_each_other(
    hpc_det: Command, root: Path, config: Path, code: Path, flags: list[str], said: str
) -> None:
    told = (2, "", f"hpc-det: {said}\n")
    assert hpc_det("experiment", "create", config, code, *flags) == told
    assert hpc_det("run", "experiment=digits", *flags) == told
    assert not root.exists()


@pytest.mark.parametrize("flags", [["--local"], ["--local", "--test"], ["--local", "--pdb"]])
def test_an_entrypoint_without_a_trial_has_nothing_to_run_here(
    hpc_det: Command, root: Path, config: Path, code: Path, flags: list[str]
) -> None:
    result = hpc_det("experiment", "create", config, code, *flags, "--config", "entrypoint=python3 -m train")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"hpc-det: --local: {NOWHERE}; use one with `--trial module:Class`")
    assert result.err.count("\n") == 1
    assert not root.exists()


def test_a_wrong_config_is_told_before_anything_runs(hpc_det: Command, root: Path, config: Path, code: Path) -> None:
    result = hpc_det("experiment", "create", config, code, "--local", "--config", "max_restart=3")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("hpc-det: max_restart: unknown key 'max_restart'")
    assert not root.exists()


def test_a_test_shows_that_it_is_one_batch_of_everything(hpc_det: Command, config: Path, code: Path) -> None:
    arguments = ["--config", "description=six digits", "--config", "max_restarts=3", "--test", "--dry-run", "--explain"]
    lines = hpc_det("experiment", "create", config, code, *arguments).out.splitlines()
    shown = dict(line.removeprefix("# ").rsplit("  ", 1)[0].strip().split(": ", 1) for line in lines if "  (" in line)
    assert shown["description"] == '"[test-mode] six digits"'
    assert shown["searcher.max_length.batches"] == "1"
    assert shown["max_restarts"] == "0"
    saved = [f"checkpoint_storage.save_{which}" for which in ("experiment_best", "trial_best", "trial_latest")]
    assert [shown[key] for key in saved] == ["0", "0", "0"]


def test_explain_is_for_a_local_run_too(hpc_det: Command, config: Path, code: Path) -> None:
    arguments = ["--local", "--explain", "--config", "resources.slots_per_trial=2"]
    result = hpc_det("experiment", "create", config, code, *arguments, "--config", "entrypoint=python3 -m train")
    assert "# resources.slots_per_trial: 1 " in result.out
    assert NOWHERE in result.err
