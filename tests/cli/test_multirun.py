from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command

RATES = "hyperparameters.learning_rate=0.1,0.01"


@pytest.mark.parametrize("sign", ["-m", "--multirun"])
def test_a_dry_run_shows_the_script_of_all_and_the_points(hpc_det: Command, root: Path, sign: str) -> None:
    shown = hpc_det("run", sign, "experiment=digits", "cluster=slurm", RATES, "max_restarts=1,2", "--dry-run")
    assert (shown.code, shown.err) == (0, "")
    assert "\n#SBATCH --array=0-3\n" in shown.out
    assert shown.out.splitlines()[-4:] == [
        "# trial 1: hyperparameters.learning_rate=0.1 max_restarts=1",
        "# trial 2: hyperparameters.learning_rate=0.1 max_restarts=2",
        "# trial 3: hyperparameters.learning_rate=0.01 max_restarts=1",
        "# trial 4: hyperparameters.learning_rate=0.01 max_restarts=2",
    ]
    assert not root.exists()


def test_explain_lists_the_points(hpc_det: Command) -> None:
    out = hpc_det("run", "-m", "experiment=digits", RATES, "--dry-run", "--explain").out
    assert "# trial 1: hyperparameters.learning_rate=0.1\n# trial 2: hyperparameters.learning_rate=0.01\n" in out


def test_without_values_to_sweep_it_is_one_trial(hpc_det: Command) -> None:
    shown = hpc_det("run", "-m", "experiment=digits", "--dry-run")
    assert shown.out.splitlines()[-1].startswith("# trial 1: ")
    assert shown.err == "hpc-det: note: -m: no override has several values, such as KEY=A,B; there is one trial\n"


def test_equal_points_are_worth_a_note(hpc_det: Command) -> None:
    shown = hpc_det("run", "-m", "experiment=digits", "hyperparameters.learning_rate=0.1,0.2,0.10", "--dry-run")
    assert shown.err == "hpc-det: note: -m: trials 1 and 3 are the same: hyperparameters.learning_rate=0.1\n"
    different = hpc_det("run", "-m", "experiment=digits", "reproducibility.experiment_seed=1,2", "--dry-run")
    assert (different.code, different.err) == (0, "")


def test_a_test_is_one_of_each_point(hpc_det: Command) -> None:
    out = hpc_det("run", "-m", "experiment=digits", "searcher.max_length=50,60", "--test", "--dry-run", "--explain").out
    assert "# searcher.max_length.batches: 1 " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([RATES, "--local"], ["--local: trains one trial in this process, and a sweep has many; leave out --multirun"]),
        (
            ["resources.slots_per_trial=1,2"],
            [
                "resources.slots_per_trial differs between points; a sweep's trials share one kind of job: start one "
                "sweep for each"
            ],
        ),
        (
            ["scheduling_unit=5,many", "max_restarts=-1,1"],
            [
                "point 1 and 1 more (scheduling_unit=5 max_restarts=-1): max_restarts: got -1 (from config); expected "
                "a whole number >= 0",
                "point 3 and 1 more (scheduling_unit=many max_restarts=-1): scheduling_unit: got 'many' (from config); "
                "expected a whole number >= 1",
            ],
        ),
    ],
)
def test_what_is_refused(hpc_det: Command, root: Path, arguments: list[str], said: list[str]) -> None:
    result = hpc_det("run", "-m", "experiment=digits", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [f"hpc-det: {line}" for line in said]
    assert not list((root / "experiments").glob("*"))


def test_without_multirun_several_values_are_refused(hpc_det: Command) -> None:
    result = hpc_det("run", "experiment=digits", RATES, "--dry-run")
    assert result.code == 2
    assert "Ambiguous value for argument" in result.err
