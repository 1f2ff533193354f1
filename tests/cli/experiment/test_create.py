from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.facts import each_names, unnamed

SLURM = ("--cluster", "slurm", "--config", "resources.slots_per_trial=4")
Stub = Callable[[str, str], None]


@pytest.fixture
def sbatch(slurm_commands: Stub, tmp_path: Path) -> Path:
    """Stub an sbatch that accepts every job; return the path to which it copies the script."""
    submitted = tmp_path / "submitted.sh"
    slurm_commands("sbatch", f'cp "${{!#}}" "{submitted}"; echo 4711')
    return submitted


def is_untouched(root: Path) -> bool:
    return not list((root / "experiments").glob("*"))


# --- configurations that are accepted


@pytest.mark.integration
def test_create_submits_and_says_so_in_its_last_line(
    hpc_det: Command, root: Path, config: Path, code: Path, sbatch: Path
) -> None:
    result = hpc_det("experiment", "create", config, code, *SLURM)
    assert result == (0, "Created experiment 1\n", "")
    job = json.loads((root / "experiments/1/jobs/1.json").read_text())
    assert (job["job_id"], job["scheduler"]) == ("4711", "slurm")
    assert (root / "experiments/1/code/model_def.py").read_text() == (code / "model_def.py").read_text()


@pytest.mark.integration
def test_a_dry_run_touches_nothing_and_prints_what_is_then_submitted(
    hpc_det: Command, root: Path, config: Path, code: Path, sbatch: Path
) -> None:
    dry = hpc_det("experiment", "create", config, code, *SLURM, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert not root.exists()
    assert not sbatch.exists()
    hpc_det("experiment", "create", config, code, *SLURM)
    assert dry.out == sbatch.read_text()


def test_a_dry_run_needs_no_scheduler(hpc_det: Command, config: Path, code: Path, slurm_commands: Stub) -> None:
    result = hpc_det("experiment", "create", config, code, *SLURM, "--dry-run")
    assert result.out.startswith("#!/bin/bash\n")


def test_a_dry_run_of_several_arrays_counts_the_scripts_that_it_does_not_print(
    hpc_det: Command, root: Path, config: Path, code: Path
) -> None:
    profile = root / "conf/cluster/small.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("{name: small, scheduler: slurm, slots_per_node: 4, slot_type: gpu, max_array_size: 3}")
    search = "searcher={name: random, max_trials: 8, metric: accuracy, max_length: 10}"
    dry = hpc_det("experiment", "create", config, code, "--cluster", "small", "--config", search, "--dry-run")
    assert dry.out.count("#!/bin/bash") == 1
    assert not unnamed(dry.err, "first of 3 scripts", "max_array_size", 3)


@pytest.mark.integration
def test_run_takes_the_same_path(hpc_det: Command, root: Path, sbatch: Path) -> None:
    arguments = ["experiment=digits", "cluster=slurm", "template=small", "resources.slots_per_trial=8"]
    dry = hpc_det("run", *arguments, "--dry-run")
    assert not root.exists()
    assert hpc_det("run", *arguments) == (0, "Created experiment 1\n", "")
    assert dry.out == sbatch.read_text()


def test_run_hands_hydras_signs_through(hpc_det: Command) -> None:
    signs = ["+hyperparameters.new=1", "++max_restarts=7", "~hyperparameters.dropout"]
    out = hpc_det("run", "experiment=digits", *signs, "--dry-run", "--explain").out
    assert "# hyperparameters.new: 1 " in out
    assert "# max_restarts: 7 " in out
    assert "dropout" not in out


def test_explain_shows_who_wrote_each_key_below_the_script(hpc_det: Command, config: Path, code: Path) -> None:
    arguments = ["experiment", "create", config, code, "--template", "small", "--dry-run"]
    script = hpc_det(*arguments).out
    explained = hpc_det(*arguments, "--explain").out
    assert explained.startswith(script)
    comments = dict(line.rsplit("  ", 1) for line in explained.removeprefix(script).splitlines())
    comments = {setting.strip(): origin for setting, origin in comments.items()}
    assert comments['# name: "tiny"'] == "(config)"
    assert comments["# max_restarts: 2"] == "(template)"
    assert comments['# checkpoint_policy: "best"'] == "(default)"


def test_explain_names_the_mode_and_who_wrote_an_empty_list(hpc_det: Command, config: Path, code: Path) -> None:
    config.write_text(f"{config.read_text()}labels: []\ndata: {{}}\nslurm: {{sbatch_args: [], slots_per_node: null}}\n")
    out = hpc_det("experiment", "create", config, code, "--dry-run", "--test", "--explain").out
    explained = dict(line[2:].rsplit("  ", 1) for line in out.splitlines() if line.startswith("# ") and "  (" in line)
    origins = {setting.split(":")[0]: origin for setting, origin in explained.items()}
    assert [origins[key] for key in ("max_restarts", "searcher.max_length.batches", "description")] == ["(test)"] * 3
    assert [origins[key] for key in ("labels", "data", "slurm.sbatch_args", "name")] == ["(config)"] * 4
    assert [origins[key] for key in ("hyperparameters", "slurm.slots_per_node")] == ["(default)"] * 2


@pytest.mark.integration
def test_explain_goes_before_the_last_line_of_create(hpc_det: Command, config: Path, code: Path, sbatch: Path) -> None:
    lines = hpc_det("experiment", "create", config, code, *SLURM, "--explain").out.splitlines()
    assert all(line.startswith("# ") for line in lines[:-1])
    assert lines[-1] == "Created experiment 1"


# --- configurations that are refused: one clear message, no traceback, nothing half-created


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--config", "max_restart=3"], ["max_restart", "'max_restart'", "'max_restarts'"]),
        (["--config", "max_restarts=many"], ["max_restarts", "'many'"]),
        (["--config", "nonsense"], ["--config nonsense", "KEY=VALUE"]),
        (["--cluster", "nowhere"], ["cluster", "'nowhere'"]),
        (["--template", "nothing"], ["template", "'nothing'"]),
        (
            ["--cluster", "slurm", "--config", "resources.slots_per_trial=5"],
            ["resources.slots_per_trial", "5", "2 slots", "'slurm'", "4", "6"],
        ),
        (["--config", "entrypoint=model_def:Other"], ["entrypoint", "'Other'"]),
        (["--config", "hyperparameters.global_batch_size=0"], ["hyperparameters.global_batch_size", "0"]),
    ],
)
def test_bad_input(
    hpc_det: Command, root: Path, config: Path, code: Path, sbatch: Path, arguments: list[str], facts: list[str]
) -> None:
    result = hpc_det("experiment", "create", config, code, *arguments)
    assert (result.code, result.out) == (2, "")
    assert not unnamed(result.err, *facts)
    assert result.err.count("\n") == 1
    assert is_untouched(root)
    assert not sbatch.exists()


@pytest.mark.integration
def test_a_refused_job_leaves_no_folder_for_checkpoints(
    hpc_det: Command, root: Path, config: Path, code: Path, slurm_commands: Stub, tmp_path: Path
) -> None:
    slurm_commands("sbatch", "echo no >&2; exit 1")
    (tmp_path / "elsewhere").mkdir()
    storage = f"checkpoint_storage={{type: shared_fs, host_path: {tmp_path}/elsewhere}}"
    result = hpc_det("experiment", "create", config, code, *SLURM, "--config", storage)
    assert (result.code, result.out) == (1, "")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert is_untouched(root)


def test_every_problem_at_once(hpc_det: Command, config: Path, code: Path) -> None:
    result = hpc_det("experiment", "create", config, code, "--config", "nam=a", "--config", "max_restarts=-1")
    assert len(result.err.splitlines()) == 2
    assert all(line.startswith("hpc-det: ") for line in result.err.splitlines())


def test_a_missing_config_file(hpc_det: Command, root: Path, code: Path) -> None:
    result = hpc_det("experiment", "create", "missing.yaml", code)
    assert result.fails(2, "missing.yaml", "No such file or directory")
    assert is_untouched(root)


def test_a_missing_context_directory(hpc_det: Command, root: Path, config: Path, tmp_path: Path) -> None:
    result = hpc_det("experiment", "create", config, tmp_path / "nowhere")
    assert result.code == 2
    assert not unnamed(result.err, "context_dir", f"'{tmp_path}/nowhere'")
    assert is_untouched(root)


def test_a_template_of_a_template(hpc_det: Command, root: Path, config: Path, code: Path) -> None:
    mine = root / "conf/template/mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("template: small\n")
    result = hpc_det("experiment", "create", config, code, "--template", "mine")
    assert result.code == 2
    assert not unnamed(result.err, "'mine'", "'small'")
    assert is_untouched(root)


@pytest.mark.integration
def test_sbatch_absent(hpc_det: Command, root: Path, config: Path, code: Path, slurm_commands: Stub) -> None:
    result = hpc_det("experiment", "create", config, code, *SLURM)
    assert (result.code, result.out) == (1, "")
    assert not unnamed(result.err, "sbatch", "PATH")
    assert is_untouched(root)


@pytest.mark.integration
def test_sbatch_refusing(hpc_det: Command, root: Path, config: Path, code: Path, slurm_commands: Stub) -> None:
    slurm_commands("sbatch", "echo 'sbatch: error: Invalid account or account/partition combination' >&2; exit 1")
    result = hpc_det("experiment", "create", config, code, *SLURM)
    assert (result.code, result.out) == (1, "")
    assert "Invalid account or account/partition combination" in result.err
    assert is_untouched(root)


@pytest.mark.integration
def test_sbatch_talking_nonsense(hpc_det: Command, root: Path, config: Path, code: Path, slurm_commands: Stub) -> None:
    slurm_commands("sbatch", "echo maintenance")
    result = hpc_det("experiment", "create", config, code, *SLURM)
    assert result.code == 1
    assert "maintenance" in result.err
    assert is_untouched(root)


@pytest.mark.parametrize("override", ["max_restart=3", "cluster=nowhere", "=", "experiment=nothing"])
def test_run_refuses_bad_overrides(hpc_det: Command, root: Path, override: str) -> None:
    result = hpc_det("run", "experiment=digits", override)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("hpc-det: ")
    assert is_untouched(root)


@pytest.mark.integration
def test_the_console_script_shows_no_traceback(root: Path, config: Path, code: Path) -> None:
    script = Path(sys.executable).parent / "hpc-det"
    command = [str(script), "experiment", "create", str(config), str(code), "--config", "nam=digits"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert not unnamed(done.stderr, "hpc-det", "'nam'", "'name'")


# --- without submitting


@pytest.mark.integration
def test_a_paused_experiment_gets_its_job_when_it_is_activated(
    hpc_det: Command, root: Path, config: Path, code: Path, sbatch: Path, slurm_commands: Stub
) -> None:
    slurm_commands("squeue", "echo '4711|PENDING|Priority'")
    assert hpc_det("experiment", "create", config, code, *SLURM, "--paused").out == "Created experiment 1\n"
    assert not sbatch.exists()
    (record,) = json.loads(hpc_det("experiment", "list", "--json").out)
    assert (record["state"], record["submitted"]) == ("PAUSED", None)
    assert "State:      PAUSED: by " in hpc_det("experiment", "describe", 1).out
    assert hpc_det("experiment", "activate", 1).succeeds("experiment 1", "1 trial")
    assert sbatch.read_text() == (root / "experiments/1/jobs/1.sh").read_text()
    assert "State:      QUEUED: Priority\n" in hpc_det("experiment", "describe", 1).out


@pytest.mark.integration
def test_a_paused_experiment_can_be_killed(
    hpc_det: Command, root: Path, config: Path, code: Path, sbatch: Path
) -> None:
    hpc_det("experiment", "create", config, code, *SLURM, "--paused")
    assert hpc_det("experiment", "kill", 1).succeeds("experiment 1")
    assert not unnamed(hpc_det("e", "create", config, code, *SLURM, "--paused", "--follow").err, "--follow", "--paused")


NO_JOB = ["--local", "--dry-run", "--follow", "--paused"]
NOWHERE = "'python3 -m train'"


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--pdb"], ["--pdb", "--local"]),
        (["--pdb", "--test"], ["--pdb", "--local"]),
        (
            ["--local", "--dry-run"],
            ["--local", "--dry-run", "--follow", "--paused"],
        ),
        (
            ["--local", "--follow"],
            ["--local", "--dry-run", "--follow", "--paused"],
        ),
    ],
)
def test_flags_that_contradict_each_other(
    hpc_det: Command, root: Path, config: Path, code: Path, flags: list[str], facts: list[str]
) -> None:
    assert hpc_det("experiment", "create", config, code, *flags).fails(2, *facts)
    assert hpc_det("run", "experiment=digits", *flags).fails(2, *facts)
    assert not root.exists()


@pytest.mark.parametrize("flags", [["--local"], ["--local", "--test"], ["--local", "--pdb"]])
def test_an_entrypoint_without_a_trial_has_nothing_to_run_here(
    hpc_det: Command, root: Path, config: Path, code: Path, flags: list[str]
) -> None:
    result = hpc_det("experiment", "create", config, code, *flags, "--config", "entrypoint=python3 -m train")
    assert (result.code, result.out) == (2, "")
    assert not unnamed(result.err, "--local", NOWHERE, "--trial module:Class")
    assert result.err.count("\n") == 1
    assert not root.exists()


def test_local_needs_no_choice_of_a_cluster_on_a_login_node(
    hpc_det: Command, config: Path, code: Path, slurm_commands: Stub
) -> None:
    slurm_commands("sinfo", "exit 1")
    no_trial = ("--config", "entrypoint=python3 -m train")
    assert hpc_det("experiment", "create", config, code, *no_trial).fails(2, "Slurm", "--cluster local")
    assert hpc_det("experiment", "create", config, code, *no_trial, "--local").fails(2, NOWHERE)
    assert hpc_det("experiment", "create", "--local", config, code, *no_trial).fails(2, NOWHERE)


def test_a_wrong_config_is_told_before_anything_runs(hpc_det: Command, root: Path, config: Path, code: Path) -> None:
    result = hpc_det("experiment", "create", config, code, "--local", "--config", "max_restart=3")
    assert (result.code, result.out) == (2, "")
    assert not unnamed(result.err, "max_restart", "'max_restart'")
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
    assert unnamed(shown.err, "-m", "one trial") == []


@pytest.mark.integration
def test_equal_points_are_worth_a_note(hpc_det: Command) -> None:
    shown = hpc_det("run", "-m", "experiment=digits", "hyperparameters.learning_rate=0.1,0.2,0.10", "--dry-run")
    assert unnamed(shown.err, "-m", 1, 3, "hyperparameters.learning_rate=0.1") == []
    different = hpc_det("run", "-m", "experiment=digits", "reproducibility.experiment_seed=1,2", "--dry-run")
    assert (different.code, different.err) == (0, "")


def test_a_test_is_one_of_each_point(hpc_det: Command) -> None:
    out = hpc_det("run", "-m", "experiment=digits", "searcher.max_length=50,60", "--test", "--dry-run", "--explain").out
    assert "# searcher.max_length.batches: 1 " in out


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ([RATES, "--local"], [["--local", "--multirun"]]),
        (
            ["resources.slots_per_trial=1,2"],
            [["resources.slots_per_trial"]],
        ),
        (
            ["scheduling_unit=5,many", "max_restarts=-1,1"],
            [
                ["point 1 and 1 more", "scheduling_unit=5 max_restarts=-1", "max_restarts", "-1", "0"],
                ["point 3 and 1 more", "scheduling_unit=many max_restarts=-1", "scheduling_unit", "'many'", "1"],
            ],
        ),
    ],
)
def test_what_is_refused(hpc_det: Command, root: Path, arguments: list[str], facts: list[list[str]]) -> None:
    result = hpc_det("run", "-m", "experiment=digits", *arguments)
    assert (result.code, result.out) == (2, "")
    each_names(result.err.splitlines(), *facts)
    assert not list((root / "experiments").glob("*"))


def test_without_multirun_several_values_are_refused(hpc_det: Command) -> None:
    result = hpc_det("run", "experiment=digits", RATES, "--dry-run")
    assert result.code == 2
    assert not unnamed(result.err, RATES)
