"""Shared experiments: the rights of colleagues, of other users and of the owner."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_det.node.files import SHARED_FOLDER, take_umask_of
from hpc_det.resources import data_path
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.cli.conftest import Command, Result
from tests.cli.life import Life
from tests.cli.users import COLLEAGUE, SHARED_GROUP, STRANGER, User, hpc_det_as
from tests.facts import each_names, unnamed
from tests.schedulers.slurm.squeue_on_paper import KNOWS_NONE

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")]

SECRET = "correct-horse"
CONFIG = f"""
name: tiny
entrypoint: model_def:MyTrial
searcher: {{name: random, metric: accuracy, max_length: 10, max_trials: 2}}
data: {{url: "s3://x", secrets: {{token: {SECRET}}}}}
environment: {{environment_variables: [A=1, HF_TOKEN={SECRET}]}}
notify: [{{webhook: "https://hooks.example.org/{SECRET}"}}, {{mail: ada@example.org}}]
"""
SHARED = f"--shared={SHARED_GROUP}"
AS_USER = Callable[..., Result]


@pytest.fixture
def commons(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that all users may enter, with a stub of Slurm that accepts every job and knows none.

    The package finds its data there, since this checkout may be readable by its owner only.
    """
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    (folder / "bin").mkdir()
    for name, body in {"sbatch": "echo 4711", "squeue": KNOWS_NONE, "scancel": "exit 1"}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    for path in (folder, folder / "bin"):
        path.chmod(0o755)
    for name in ("conf", "slurm_templates"):
        _copy_for_everybody(data_path(name), folder / "package" / "_data" / name)
    (folder / "package").chmod(0o755)
    monkeypatch.setattr("hpc_det.resources._PACKAGE", folder / "package")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/bin")
    yield folder
    shutil.rmtree(folder)


def _copy_for_everybody(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in (target.parent, target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def root(commons: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the owner's state folder, which does not exist yet."""
    folder = commons / "ada"
    monkeypatch.setenv("HPC_DET_ROOT", str(folder))
    return folder


@pytest.fixture(autouse=True)
def groups(no_leaks: None) -> Iterator[None]:
    """Put the owner into the shared group."""
    before = os.getgroups()
    os.setgroups([*before, SHARED_GROUP])
    yield
    os.setgroups(before)


@pytest.fixture
def shared(hpc_det: Command, root: Path, config: Path, code: Path) -> ExperimentFolder:
    """Return the shared experiment 2, whose first trial has begun; 1 is private. Loads these commands' modules."""
    config.write_text(CONFIG)
    for choice in ([], [SHARED]):
        assert hpc_det("experiment", "create", config, code, "--cluster", "slurm", *choice).code == 0
    experiment = ExperimentStore(root).folder(2)
    life = Life(experiment, "4711", 2)
    take_umask_of(experiment.path)  # as its job does
    life.begins()
    life.rank_prints(0, "hello from rank 0\n")
    life.reports("validation", 5, {"accuracy": 0.5})
    life.saves(5)
    for command in (("list",), ("describe", 2), ("logs", 2), ("fork", 2, "--dry-run")):
        assert hpc_det("experiment", *command).code == 0
    hpc_det("trial", "logs", "2/1")
    return experiment


@pytest.fixture
def at(commons: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs a command as another user, whose state folder is separate."""

    def run(user: User, *arguments: object) -> Result:
        own = commons / str(user.number)
        own.mkdir(mode=0o700, exist_ok=True)
        os.chown(own, user.number, user.number)
        monkeypatch.setenv("HPC_DET_ROOT", str(own))
        capfd.readouterr()
        return Result(hpc_det_as(user, *arguments), *capfd.readouterr())

    return run


# --- colleagues


def test_a_colleague_lists_what_is_shared_and_only_that(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    listed = at(COLLEAGUE, "experiment", "list", "--of", root, "--json")
    assert (listed.code, listed.err) == (0, "")
    (record,) = json.loads(listed.out)
    assert (record["id"], record["name"], record["state"]) == (2, "tiny", "RUNNING")


def test_a_colleague_describes_it_by_the_owners_root_or_name(
    shared: ExperimentFolder, root: Path, at: AS_USER, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_root = at(COLLEAGUE, "experiment", "describe", f"{root}:2", "--json")
    (root.parent / "hpc_det").symlink_to(root)
    monkeypatch.setattr("hpc_det.store.experiments.pwd.getpwnam", lambda name: {"ada": _Home(str(root.parent))}[name])
    by_name = at(COLLEAGUE, "experiment", "describe", "ada:2", "--json")
    found, again = json.loads(by_root.out), json.loads(by_name.out)
    assert found["trials"][0]["checkpoints"][0]["batches"] == 5
    assert found["trials"][0]["hyperparameters"] == again["trials"][0]["hyperparameters"]
    assert not unnamed(at(COLLEAGUE, "experiment", "describe", "eve:2").err, "eve")
    nothing = at(COLLEAGUE, "experiment", "list", "--of", root / "nothing")
    assert not unnamed(nothing.err, f"{root}/nothing", "HPC_DET_ROOT")


def test_a_colleague_reads_logs_of_ranks_and_jobs(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    of_all = at(COLLEAGUE, "experiment", "logs", f"{root}:2")
    assert (of_all.code, of_all.err) == (0, "")
    assert "[trial=1] [rank=0] hello from rank 0" in of_all.out
    of_one = at(COLLEAGUE, "trial", "logs", f"{root}:2/1", "--rank", 0)
    assert of_one.out.endswith("[rank=0] hello from rank 0\n")


def test_a_command_that_a_message_suggests_names_the_colleagues_experiment(
    shared: ExperimentFolder, root: Path, at: AS_USER
) -> None:
    missing = at(COLLEAGUE, "trial", "describe", f"{root}:2/9")
    assert not unnamed(missing.err, f"hpc-det experiment list-trials {root}:2")


def test_a_log_that_only_its_owner_may_read_hides_no_other(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    log = shared.jobs / "1.log"
    log.write_text("before the job shares it\n")
    log.chmod(0o600)
    answer = at(COLLEAGUE, "experiment", "logs", f"{root}:2")
    assert (answer.code, answer.err) == (0, "")
    assert "hello from rank 0" in answer.out
    assert "before the job" not in answer.out


def test_looking_leaves_nothing_behind(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    before = _tree(root)
    for command in (("list", "--of", root), ("describe", f"{root}:2"), ("logs", f"{root}:2")):
        at(COLLEAGUE, "experiment", *command)
    assert _tree(root) == before


def test_a_full_journal_is_read_without_being_sealed(
    shared: ExperimentFolder, root: Path, at: AS_USER, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.store.shared_log.CHUNK", 2)
    assert len(list(shared.search.glob("*.json"))) >= 2
    assert at(COLLEAGUE, "experiment", "describe", f"{root}:2").code == 0
    assert not list(shared.search.glob("*.jsonl"))
    SearchJournal(shared).state()
    assert list(shared.search.glob("*.jsonl"))
    assert at(COLLEAGUE, "experiment", "describe", f"{root}:2").code == 0


@pytest.mark.parametrize(
    "command", [("pause",), ("activate",), ("cancel",), ("kill",), ("continue",), ("continue", "--config", "x=1")]
)
def test_a_colleague_changes_nothing(
    shared: ExperimentFolder, root: Path, at: AS_USER, command: tuple[str, ...]
) -> None:
    before = _tree(root)
    name, *options = command
    refused = at(COLLEAGUE, "experiment", name, f"{root}:2", *options)
    assert refused.code == 2
    assert not unnamed(refused.err, f"experiment {root}:2", "root")
    assert f"`hpc-det experiment fork {root}:2`" in refused.err
    assert _tree(root) == before


def test_the_file_system_refuses_it_as_well(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    writable = [path for path in _all(root) if stat.S_IMODE(path.lstat().st_mode) & 0o022 and not path.is_symlink()]
    assert writable == []


def test_whoever_sets_the_owners_root_is_still_nobody_else(
    shared: ExperimentFolder, root: Path, hpc_det: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: COLLEAGUE.number)
    assert not unnamed(hpc_det("experiment", "kill", 2).err, f"{root}:2", "root")
    assert not unnamed(hpc_det("experiment", "archive", 2).err, f"{root}:2", "root")


def test_the_owner_goes_on_and_colleagues_see_that(
    shared: ExperimentFolder, root: Path, hpc_det: Command, at: AS_USER, monkeypatch: pytest.MonkeyPatch
) -> None:
    SearchJournal(shared).cancel("root")
    SearchJournal(shared).lose(0, "4711_0")
    continued = hpc_det("experiment", "continue", 2, "--config", "searcher.max_trials=5")
    assert (continued.code, unnamed(continued.out, "experiment 2", "5 trials")) == (0, [])
    found = json.loads(at(COLLEAGUE, "experiment", "describe", f"{root}:2", "--json").out)
    assert found["trial_counts"]["expected"] == 5
    assert (found["owner"], found["shared_with"]) == ("root", str(SHARED_GROUP))
    assert SECRET not in (shared.masked / "effective.json").read_text()


def test_a_colleague_makes_a_report_of_it_without_the_secrets(
    shared: ExperimentFolder, root: Path, hpc_det: Command, at: AS_USER
) -> None:
    assert hpc_det("report", 2, "--json").code == 0  # loads the modules of the command
    found = at(COLLEAGUE, "report", f"{root}:2", "--json")
    assert (found.code, found.err) == (0, "")
    assert SECRET not in found.out
    facts = json.loads(found.out)
    assert (facts["id"], len(facts["trials"])) == (2, 1)
    assert {row["key"]: row["value"] for row in facts["config"]}["data.secrets.token"] == "********"


# --- fork


OWN_SECRETS = (
    *("--config", "data.secrets.token=mine"),
    *("--config", "environment.environment_variables=[A=1, HF_TOKEN=mine]"),
)


def test_a_fork_names_each_secret_that_has_to_be_given_again(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    refused = at(COLLEAGUE, "experiment", "fork", f"{root}:2")
    assert refused.code == 2
    variables = "--config 'environment.environment_variables=[HPC_DET_COMPAT=determined, A=1, HF_TOKEN=VALUE]'"
    each_names(
        refused.err.splitlines(),
        ["data.secrets.token", "root", "--config data.secrets.token=VALUE"],
        ["environment.environment_variables", "HF_TOKEN", "root", variables],
    )


def test_a_fork_with_secrets_of_ones_own_is_ones_own(
    shared: ExperimentFolder, root: Path, commons: Path, at: AS_USER
) -> None:
    forked = at(COLLEAGUE, "experiment", "fork", f"{root}:2", *OWN_SECRETS)
    assert forked == (0, "Created experiment 1\n", "")
    fork = ExperimentStore(commons / str(COLLEAGUE.number)).folder(1)
    assert json.loads(fork.effective.read_text())["data"]["secrets"] == {"token": "mine"}
    assert (fork.code / "model_def.py").read_text() == (shared.code / "model_def.py").read_text()
    assert {path.lstat().st_uid for path in _all(fork.path)} == {COLLEAGUE.number}
    assert stat.S_IMODE(fork.path.stat().st_mode) == 0o700


def test_news_of_a_fork_go_to_those_that_it_names(
    shared: ExperimentFolder, root: Path, commons: Path, at: AS_USER
) -> None:
    for choice in ((), ("--config", "notify=[{mail: bob}]")):
        assert at(COLLEAGUE, "experiment", "fork", f"{root}:2", *OWN_SECRETS, *choice).code == 0
    forks = ExperimentStore(commons / str(COLLEAGUE.number))
    answer = [json.loads(forks.folder(number).effective.read_text())["notify"] for number in (1, 2)]
    assert [[hook["mail"] for hook in hooks] for hooks in answer] == [[], ["bob"]]


# --- other users


def test_a_stranger_sees_nothing(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    listed = at(STRANGER, "experiment", "list", "--of", root)
    assert (listed.code, listed.out) == (2, "")
    assert unnamed(listed.err, f"{root}/experiments") == []
    described = at(STRANGER, "experiment", "describe", f"{root}:2")
    assert described.code == 2
    assert not unnamed(described.err, "experiment 2", root, "shared")


def test_a_private_experiment_is_private_beside_a_shared_one(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    refused = at(COLLEAGUE, "experiment", "describe", f"{root}:1")
    assert refused.code == 2
    assert not unnamed(refused.err, "experiment 1", root, "shared")
    assert stat.S_IMODE((root / "experiments/1").stat().st_mode) == 0o700


# --- modes and secrets


def test_no_secret_is_in_what_the_group_may_read(shared: ExperimentFolder, root: Path) -> None:
    for path in _all(root):
        if path.is_file() and SECRET in path.read_text(errors="replace"):
            shut = [part for part in (path, *path.parents) if not part.stat().st_mode & stat.S_IRGRP and part != root]
            assert shut, path
    assert SECRET in shared.effective.read_text()


def test_what_is_shared_is_for_the_group_and_for_nobody_else(shared: ExperimentFolder) -> None:
    for path in _all(shared.path):
        found = path.lstat()
        assert found.st_gid == SHARED_GROUP
        assert not stat.S_IMODE(found.st_mode) & 0o027 or path.is_symlink(), path
    private = {
        str(path.relative_to(shared.path))
        for path in _all(shared.path)
        if not path.stat().st_mode & stat.S_IRGRP and path.parent.stat().st_mode & stat.S_IRGRP
    }
    assert private == {"cluster.json", "effective.json", "jobs/1.sh", "plan.json", "submitit", "trials/1/trial.json"}


def test_a_root_lets_its_group_through_and_shows_it_only_numbers(shared: ExperimentFolder, root: Path) -> None:
    assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in (root, root / "experiments", shared.path)] == [
        "0o710",
        "0o750",
        oct(SHARED_FOLDER),
    ]


def test_custom_search_code_of_others_is_not_run(shared: ExperimentFolder, root: Path, at: AS_USER) -> None:
    for path in (shared.effective, shared.masked / "effective.json"):
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "searcher": {**config["searcher"], "name": "custom", "class": "x:Y"}}))
    described = at(COLLEAGUE, "experiment", "describe", f"{root}:2")
    assert not unnamed(described.err, "searcher.class", "root")
    assert "(cannot be shown)" in at(COLLEAGUE, "experiment", "list", "--of", root).out


class _Home:
    def __init__(self, pw_dir: str) -> None:
        self.pw_dir = pw_dir


def _all(folder: Path) -> list[Path]:
    return [folder, *sorted(folder.rglob("*"))]


def _tree(folder: Path) -> list[tuple[str, int, int]]:
    return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_mode) for path in _all(folder)]
