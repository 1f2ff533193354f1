"""The code of an experiment: included files, the commit, and the copy that ranks import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import HOOK
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.cli.conftest import TRIAL, Command
from tests.facts import unnamed
from tests.schedulers.slurm.squeue_on_paper import KNOWS_NONE
from tests.wait import DEADLINE_S, wait_for

Stub = Callable[[str, str], None]
GIT = shutil.which("git") or "git"
SLURM = ("--cluster", "slurm", "--config", "resources.slots_per_trial=4")


@pytest.fixture
def create(hpc_det: Command, root: Path, config: Path, code: Path, slurm_commands: Stub) -> Callable[..., Path]:
    """Return a function that creates an experiment on a Slurm that accepts every job, and returns its folder."""
    slurm_commands("sbatch", "echo 4711")
    slurm_commands("squeue", KNOWS_NONE)

    def run(*options: object) -> Path:
        created = hpc_det("experiment", "create", config, code, *SLURM, *options)
        assert (created.code, created.err) == (0, "")
        return root / "experiments" / created.out.split()[-1]

    return run


Create = Callable[..., Path]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return a folder outside the context directory, with a trial and a library."""
    folder = tmp_path / "elsewhere"
    (folder / "library" / "deep").mkdir(parents=True)
    (folder / "other_def.py").write_text(TRIAL)
    (folder / "library" / "deep" / "layers.py").write_text("")
    return folder


OTHER = ("--config", "entrypoint=other_def:MyTrial")


# --- included files


@pytest.mark.integration
def test_a_job_gets_what_is_included_and_its_entrypoint_may_be_there(
    create: Create, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(elsewhere)
    experiment = create("-i", "other_def.py", "--include", elsewhere / "library", *OTHER)
    copied = [str(path.relative_to(experiment / "code")) for path in (experiment / "code").rglob("*.py")]
    assert sorted(copied) == ["library/deep/layers.py", "model_def.py", "other_def.py"]


@pytest.mark.integration
def test_a_fork_has_it_too(create: Create, hpc_det: Command, root: Path, elsewhere: Path) -> None:
    create("-i", elsewhere / "other_def.py", *OTHER)
    (elsewhere / "other_def.py").unlink()
    assert hpc_det("experiment", "fork", 1).out == "Created experiment 2\n"
    assert (root / "experiments/2/code/other_def.py").read_text() == TRIAL


def test_check_and_dry_run_know_it(hpc_det: Command, root: Path, config: Path, code: Path, elsewhere: Path) -> None:
    for command in (["config", "check"], ["experiment", "create", "--dry-run"]):
        assert not unnamed(hpc_det(*command, config, code, *OTHER).err, "'other_def'")
        assert hpc_det(*command, config, code, *OTHER, "-i", elsewhere / "other_def.py").code == 0
    assert not root.exists()


@pytest.mark.integration
@pytest.mark.parametrize("multirun", [[], ["-m", "hyperparameters.learning_rate=0.1,0.01"]])
def test_run_takes_it_as_well(
    hpc_det: Command, root: Path, slurm_commands: Stub, elsewhere: Path, multirun: list[str]
) -> None:
    slurm_commands("sbatch", "echo 4711")
    here = ["experiment=digits", "cluster=slurm", "entrypoint='other_def:MyTrial'"]
    assert hpc_det("run", *here, *multirun, "-i", elsewhere / "other_def.py").out == "Created experiment 1\n"
    assert (root / "experiments/1/code/other_def.py").exists()


def test_a_search_of_the_users_own_may_be_included(hpc_det: Command, config: Path, code: Path, elsewhere: Path) -> None:
    (elsewhere / "my_search.py").write_text("class MySearch: ...\n")
    search = (
        "--config",
        "searcher={name: custom, class: 'my_search:MySearch', metric: a, max_length: 9, max_trials: 1}",
    )
    answer = hpc_det("config", "check", config, code, *search, "-i", elsewhere / "my_search.py")
    assert f"{elsewhere}/my_search.py" in answer.err


def test_what_would_hide_the_code_is_refused_before_anything_is_submitted(
    hpc_det: Command, root: Path, config: Path, code: Path, elsewhere: Path
) -> None:
    (elsewhere / "model_def.py").write_text(TRIAL)
    answer = hpc_det("experiment", "create", config, code, "-i", elsewhere / "model_def.py")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert not unnamed(answer.err, f"--include {elsewhere}/model_def.py", f"{code}/model_def.py")
    assert not root.exists()


def test_what_is_not_there_cannot_be_included(hpc_det: Command, config: Path, code: Path) -> None:
    answer = hpc_det("experiment", "create", config, code, "-i", "no-such-file")
    assert answer.code == 2
    assert "'no-such-file' does not exist" in answer.err


def test_a_training_in_this_process_is_on_the_folder_itself(
    hpc_det: Command, config: Path, code: Path, elsewhere: Path
) -> None:
    answer = hpc_det("experiment", "create", config, code, "--local", "-i", elsewhere)
    assert (answer.code, unnamed(answer.err, "--local", "CONTEXT_DIR")) == (2, [])


# --- the commit


@pytest.fixture
def repository(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the context directory as a repository with one commit."""
    monkeypatch.setenv("HOME", str(tmp_path))
    who = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run([GIT, *arguments], cwd=code, check=True)
    return code


def lines(text: str) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in text.splitlines()]


@pytest.mark.integration
def test_an_experiment_says_which_commit_its_code_was(
    repository: Path, tmp_path: Path, hpc_det: Command, create: Create
) -> None:
    (tmp_path / "bin" / "git").symlink_to(GIT)
    head = subprocess.check_output([GIT, "rev-parse", "HEAD"], cwd=repository, text=True).strip()
    create()
    (repository / "model_def.py").write_text(f"{TRIAL}# edited\n")
    experiment = create()
    assert ["Code:", "commit", head[:7]] in lines(hpc_det("e", "describe", 1).out)
    assert ["Code:", "commit", head[:7], "with", "changes"] in lines(hpc_det("e", "describe", 2).out)
    code = json.loads(hpc_det("e", "describe", 2, "--json").out)["code"]
    assert code == {"commit": head, "branch": "main", "remote": None, "dirty": True}
    assert "# edited" in (experiment / "git.diff").read_text()
    assert (experiment / "git.diff").stat().st_mode & 0o777 == 0o600

    hpc_det("experiment", "fork", 2)
    assert json.loads(hpc_det("e", "describe", 3, "--json").out)["code"] == code


@pytest.mark.integration
def test_an_experiment_yaml_beside_the_code_is_not_taken_for_another_experiment(
    repository: Path, tmp_path: Path, create: Create
) -> None:
    (tmp_path / "bin" / "git").symlink_to(GIT)
    (repository.parent / "experiment.yaml").write_text("name: mine\n")
    assert (create() / "git.json").exists()


@pytest.mark.integration
def test_without_a_repository_an_experiment_says_nothing_of_a_commit(create: Create, hpc_det: Command) -> None:
    experiment = create()
    assert "commit" not in hpc_det("e", "describe", 1).out
    assert json.loads(hpc_det("e", "describe", 1, "--json").out)["code"] is None
    assert not (experiment / "git.json").exists()


# --- imports of ranks

TELLS = """
import pathlib, sys, time
while not pathlib.Path("{gate}").exists():
    time.sleep(0.01)
import late, select
print(late.WHERE, file=open("{answer}", "w"))
"""


@pytest.mark.integration
def test_ranks_import_the_copy_whatever_lies_where_it_was_submitted(
    hpc_det: Command, root: Path, config: Path, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy wins over a later edit and over modules in the working folder, on PYTHONPATH or of a library's name."""
    gate, answer = tmp_path / "gate", tmp_path / "answer"
    (code / "script.py").write_text(TELLS.format(gate=gate, answer=answer))
    (code / "late.py").write_text("WHERE = 'the copy'\n")
    for name, where in (("submitted_from", "where it was submitted"), ("on_path", "PYTHONPATH")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "late.py").write_text(f"WHERE = {where!r}\n")
    (tmp_path / "submitted_from" / "select.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path / "submitted_from")
    others = (str(tmp_path / "on_path"), str(code), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, others)))
    config.write_text("{entrypoint: python3 script.py, searcher: {metric: a}}")
    assert hpc_det("experiment", "create", config, code).out == "Created experiment 1\n"
    (code / "late.py").write_text("WHERE = 'an edit after the submission'\n")
    gate.touch()
    wait_for(answer.exists, DEADLINE_S, otherwise=lambda: _logs(ExperimentStore(root).folder(1)))
    assert hpc_det("experiment", "wait", 1).code == 0
    assert answer.read_text() == "the copy\n"


def _logs(experiment: ExperimentFolder) -> str:
    return "\n".join(path.read_text() for path in experiment.path.rglob("*.log"))


# --- the startup hook


STRICT = """
name: strict
scheduler: local
slots_per_node: 2
max_nodes: 1
slot_type: cpu
startup_hook: false
"""


def has_hook(folder: Path) -> bool:
    return JobPlan.of(ExperimentFolder(folder)).startup_hook


@pytest.mark.integration
def test_agents_run_a_startup_hook_of_the_context_directory_or_an_included_one(
    create: Create, code: Path, elsewhere: Path
) -> None:
    assert not has_hook(create())
    (elsewhere / HOOK).write_text("export A=1\n")
    assert has_hook(create("--include", elsewhere / HOOK))
    (code / "below").mkdir()
    (code / "below" / HOOK).write_text("export A=1\n")
    assert not has_hook(create())
    (code / HOOK).write_text("export A=1\n")
    assert has_hook(create())


@pytest.mark.integration
def test_a_startup_hook_that_detignore_names_is_none(create: Create, code: Path) -> None:
    (code / HOOK).write_text("export A=1\r\n")
    (code / ".detignore").write_text(f"{HOOK}\n")
    assert not has_hook(create())


@pytest.mark.parametrize("command", [["config", "check"], ["experiment", "create"]])
@pytest.mark.parametrize(
    ("pattern", "entrypoint", "file"),
    [
        ("model_def.py", "model_def:MyTrial", "model_def.py"),
        ("*", "python3 -m hpc_det.launch.torch_distributed -- python3 ./sub/../train.py", "train.py"),
        ("sub/", "python3 sub/train.py", "sub/train.py"),
    ],
)
def test_an_entrypoint_whose_file_detignore_names_is_refused(
    hpc_det: Command, root: Path, config: Path, code: Path, command: list[str], pattern: str, entrypoint: str, file: str
) -> None:
    (code / "sub").mkdir()
    for script in (code / "train.py", code / "sub" / "train.py"):
        script.write_text("import hpc_det.core\n")
    (code / ".detignore").write_text(f"{pattern}\n")
    words = [*command, config, code, "--config", f"entrypoint={entrypoint}"]
    assert hpc_det(*words).fails(2, "entrypoint", code / file, ".detignore")
    assert not root.exists()
    (code / ".detignore").write_text("other/\n")
    assert hpc_det("config", "check", *words[2:]).code == 0
    (code / ".detignore").write_text(f"{pattern}\n!{HOOK}\n")
    (code / HOOK).write_text("git clone ...\n")
    assert hpc_det("config", "check", *words[2:]).code == 0


@pytest.mark.parametrize("command", [["config", "check"], ["experiment", "create"], ["experiment", "create", "-n"]])
def test_a_cluster_that_allows_no_startup_hooks_refuses_the_experiment(
    hpc_det: Command, root: Path, config: Path, code: Path, command: list[str]
) -> None:
    profiles = root / "conf" / "cluster"
    profiles.mkdir(parents=True)
    (profiles / "strict.yaml").write_text(STRICT)
    words = ["--dry-run" if word == "-n" else word for word in command]
    arguments = [config, code, "--cluster", "strict"]
    (code / HOOK).write_text("export A=1\n")
    assert hpc_det(*words[:2], *arguments, *words[2:]).fails(2, HOOK, "'strict'", "startup_hook: false", ".detignore")
    assert not (root / "experiments").exists()
    (code / ".detignore").write_text(f"{HOOK}\n")
    assert hpc_det("config", "check", *arguments).code == 0


def test_a_startup_hook_with_a_carriage_return_in_a_text_is_one(hpc_det: Command, config: Path, code: Path) -> None:
    (code / HOOK).write_bytes(b"cat >request <<X\nGET /\r\n\r\nX\nexport A=1\nexport B=1\nexport C=1\n")
    assert hpc_det("config", "check", config, code).code == 0


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_startup_hook_that_bash_cannot_source_is_refused(
    hpc_det: Command, config: Path, code: Path, kind: str
) -> None:
    if kind == "folder":
        (code / HOOK).mkdir()
    else:
        (code / HOOK).symlink_to("no-such-file")
    assert hpc_det("config", "check", config, code).fails(2, code / HOOK, ".detignore")
    (code / ".detignore").write_text(f"{HOOK}\n")
    assert hpc_det("config", "check", config, code).code == 0


@pytest.mark.integration
@pytest.mark.parametrize("command", [["config", "check"], ["experiment", "create"]])
def test_a_startup_hook_with_windows_line_ends_is_refused_with_the_command_that_converts_it(
    hpc_det: Command, root: Path, config: Path, code: Path, command: list[str]
) -> None:
    (code / HOOK).write_bytes(b"#!/bin/bash\r\nexport A=1\r\n")
    said = hpc_det(*command, config, code)
    assert said.fails(2, code / HOOK, "CRLF", "sed")
    subprocess.run(["sh", "-c", said.err[said.err.index("sed ") :]], check=True)
    assert (code / HOOK).read_bytes() == b"#!/bin/bash\nexport A=1\n"
    assert hpc_det("config", "check", config, code).code == 0
