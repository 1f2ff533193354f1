"""The functions of hpc_det.client: creating, finding and listing experiments."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_det import client
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.errors import UsageError
from hpc_det.store.experiment_config import write_about
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import refused


def test_every_public_name_is_there() -> None:
    assert [name for name in client.__all__ if not hasattr(client, name)] == []
    assert client.list is not list
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = client.no_such_name


@pytest.fixture
def tree(config: Path) -> dict[str, Any]:
    return load_yaml(config)


def test_a_dry_run_is_that_of_the_command(hpc_det: Command, config: Path, code: Path) -> None:
    shown = hpc_det("e", "create", config, code, "--dry-run", "--cluster", "slurm").out
    assert client.dry_run(config, code, cluster="slurm") == [shown]
    assert list(client.list()) == []


def test_a_file_and_its_content_are_the_same_experiment(config: Path, code: Path, tree: dict[str, Any]) -> None:
    assert client.dry_run(tree, code) == client.dry_run(str(config), str(code))
    assert tree == load_yaml(config)


@pytest.mark.integration
@pytest.mark.parametrize("overrides", [{"name": "other", "max_restarts": 3}, ["name=other", "max_restarts=3"]])
def test_a_created_experiment_has_the_overrides(config: Path, code: Path, overrides: Any) -> None:
    experiment = client.create(config, code, overrides=overrides, paused=True)
    assert (experiment.id, experiment.state, experiment.name) == (1, "PAUSED", "other")
    assert experiment.config["max_restarts"] == 3
    assert experiment.folder.path.stat().st_mode & 0o077 == 0
    assert experiment.folder.config.stat().st_mode & 0o077 == 0


@pytest.mark.integration
def test_texts_of_overrides_remain_texts(config: Path, code: Path) -> None:
    overrides = {"description": "1e3", "hyperparameters.lr": 1e-5}
    experiment = client.create(config, code, overrides=overrides, paused=True)
    assert experiment.config["description"] == "1e3"
    assert experiment.config["hyperparameters"]["lr"] in (1e-5, {"type": "const", "val": 1e-5})


@pytest.mark.integration
def test_a_test_run_trains_one_batch(config: Path, code: Path) -> None:
    experiment = client.create(config, code, test=True, paused=True)
    assert experiment.config["searcher"]["max_length"] == {"batches": 1}


def test_all_problems_are_raised_and_nothing_is_created(code: Path, root: Path) -> None:
    wrong = {"entrypoint": "model_def:MyTrial", "searcher": {"metric": "accuracy"}, "max_restart": 3}
    with refused(UsageError, "max_restart", "max_restarts", "searcher.max_length"):
        client.create(wrong, code)
    assert list(client.list()) == []


@pytest.mark.parametrize("names", [{"cluster": "slrm"}, {"template": "tiny"}])
def test_an_unknown_cluster_or_template_is_refused(config: Path, code: Path, names: dict[str, str]) -> None:
    with refused(UsageError, *names, *names.values()):
        client.create(config, code, **names)  # type: ignore[arg-type]


@pytest.mark.integration
def test_a_fork_is_a_new_experiment_with_the_same_code(
    config: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.create(config, code, paused=True)
    queued: list[object] = []
    monkeypatch.setattr("hpc_det.submit.submission.queue_jobs", lambda jobs, *_: queued.append(jobs))
    (code / "model_def.py").write_text("changed after the submission")
    fork = first.fork({"name": "again"})
    assert (fork.id, fork.name, len(queued)) == (2, "again", 1)
    assert (fork.folder.code / "model_def.py").read_text() == (first.folder.code / "model_def.py").read_text()


def test_lists_are_filtered(root: Path, scheduler: FakeScheduler) -> None:
    lives = [Life.submitted(root, title=title) for title in ("digits", "digits", "other")]
    lives[0].begins()
    lives[0].finishes()
    write_about(lives[1].folder, labels=["baseline", "sweep"])
    write_about(lives[2].folder, archived=True)
    assert [found.id for found in client.list()] == [1, 2]
    assert [found.id for found in client.list(archived=True)] == [1, 2, 3]
    assert [found.id for found in client.list("COMPLETED")] == [1]
    assert [found.id for found in client.list([client.ExperimentState.RUNNING], archived=True)] == [2, 3]
    assert [found.id for found in client.list(name="other", archived=True)] == [3]
    assert [found.id for found in client.list(labels="sweep")] == [2]
    assert [found.id for found in client.list(labels=["sweep", "missing"])] == []
    assert [found.id for found in client.list(owner=str(root), name="digits")] == [1, 2]


def test_an_unknown_state_is_refused(life: Life) -> None:
    with refused(UsageError, "FINISHED", "COMPLETED"):
        client.list("FINISHED")


def test_damaged_experiments_are_left_out_with_a_note(
    root: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = [Life.submitted(root) for _ in range(2)]
    lives[0].folder.effective.write_text("{")
    assert [found.id for found in client.list()] == [2]
    assert "experiment 1" in capsys.readouterr().err


def test_what_does_not_exist_is_refused(root: Path) -> None:
    with refused(UsageError, "experiment 7", root):
        client.get(7)
    with refused(UsageError, "nobody-here"):
        client.get(1, owner="nobody-here")


def test_the_stubs_for_type_checkers_name_the_same_homes() -> None:
    """Type checkers read the imports, and Python reads the table."""
    tree = ast.parse(Path(str(sys.modules["hpc_det.client"].__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == client._HOMES
    assert sorted(imported) == sorted(client.__all__)
