"""The record of the code's commit, from real repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_det.config.entrypoint import Context
from hpc_det.submit import snapshot
from hpc_det.submit.snapshot import GitState, git_state, snapshot_of
from tests.stub import Stub
from tests.stub import stub as stub

pytestmark = pytest.mark.integration


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit of model_def.py, data.bin and lib/a.py on the branch `main`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "repository"
    (folder / "lib").mkdir(parents=True)
    for name in ("model_def.py", "data.bin", "lib/a.py"):
        (folder / name).write_text(f"{name}, first\n")
    run(folder, "init", "--quiet", "--initial-branch=main", ".")
    run(folder, "add", ".")
    commit(folder)
    return folder


def run(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> None:
    run(folder, "-c", "user.name=ada", "-c", "user.email=ada@example.org", "commit", "--quiet", "--message=first")


def found(context: Path) -> GitState:
    state = asked(context)
    assert state is not None
    return state


def asked(context: Path) -> GitState | None:
    return git_state(context, snapshot_of(Context(context)).files)


def test_a_clean_work_tree_is_its_commit(repository: Path) -> None:
    assert found(repository).as_json() == {
        "commit": run(repository, "rev-parse", "HEAD"),
        "branch": "main",
        "dirty": False,
        "remote": None,
        "changed": [],
        "untracked": [],
    }
    assert found(repository).diff == b""


def test_what_differs_is_told_and_makes_the_same_code_of_the_commit(repository: Path, tmp_path: Path) -> None:
    (repository / "model_def.py").write_text("edited\n")
    (repository / "new file.py").write_text("new\n")
    (repository / "staged.py").write_text("staged\n")
    run(repository, "add", "staged.py")
    (repository / "lib" / "a.py").unlink()
    state = found(repository)
    assert (state.changed, state.untracked) == (["lib/a.py", "model_def.py", "staged.py"], ["new file.py"])
    assert state.as_json()["dirty"]
    (tmp_path / "diff").write_bytes(state.diff)
    run(tmp_path, "clone", "--quiet", str(repository), "again")
    run(tmp_path / "again", "apply", str(tmp_path / "diff"))
    assert (tmp_path / "again" / "model_def.py").read_text() == "edited\n"
    assert not (tmp_path / "again" / "lib" / "a.py").exists()


def test_what_the_job_does_not_get_is_not_told(repository: Path) -> None:
    """Such a file is not part of the code and may contain a secret."""
    (repository / "data.bin").write_text("a secret\n")
    (repository / "notes.log").write_text("a secret\n")
    (repository / ".detignore").write_text("*.bin\n*.log\n")
    assert not found(repository).as_json()["dirty"]
    assert b"secret" not in found(repository).diff


@pytest.mark.parametrize("ignored", ["*.bin", "secrets/\n!secrets/data.bin"])
def test_what_the_job_would_not_get_is_not_told_after_it_was_deleted(repository: Path, ignored: str) -> None:
    (repository / "secrets").mkdir()
    (repository / "secrets" / "data.bin").write_text("a secret\n")
    run(repository, "add", ".")
    commit(repository)
    (repository / ".detignore").write_text(f"{ignored}\n")
    (repository / "secrets" / "data.bin").unlink()
    (repository / "model_def.py").unlink()
    assert found(repository).changed == ["model_def.py"]
    assert b"secret" not in found(repository).diff


def test_a_context_below_the_root_is_told_by_itself(repository: Path) -> None:
    (repository / "model_def.py").write_text("edited\n")
    (repository / "lib" / "b.py").write_text("new\n")
    assert (found(repository / "lib").changed, found(repository / "lib").untracked) == ([], ["b.py"])
    (repository / "lib" / "a.py").write_text("edited\n")
    assert found(repository / "lib").changed == ["a.py"]
    assert b"+++ b/lib/a.py\n" in found(repository / "lib").diff


def test_a_head_that_is_no_branch_has_none(repository: Path) -> None:
    run(repository, "checkout", "--quiet", "--detach")
    assert found(repository).branch is None


def test_a_submodule_is_known_as_a_whole(repository: Path) -> None:
    run(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(repository), "module")
    commit(repository)
    assert not found(repository).as_json()["dirty"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://ada:token@example.org/ada/x.git?access_token=token#token", "https://example.org/ada/x.git"),
        ("https://token@example.org:8443/x", "https://example.org:8443/x"),
        ("ssh://git:token@example.org/x.git", "ssh://git@example.org/x.git"),
        ("git@example.org:ada/x.git", "git@example.org:ada/x.git"),
        ("/srv/git/x", "/srv/git/x"),
        ("https://[token/x", None),
    ],
)
def test_the_remote_is_told_without_secrets(repository: Path, url: str, shown: str | None) -> None:
    run(repository, "config", "remote.origin.url", url)
    assert found(repository).remote == shown


def test_a_long_diff_is_cut_at_the_end_of_a_line(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_DIFF_BYTES", 1000)
    monkeypatch.setattr(snapshot, "_FILES_A_CALL", 1)
    (repository / "model_def.py").write_text("a line\n" * 1000)
    (repository / "lib" / "a.py").write_text("a line\n" * 1000)
    lines = found(repository).diff.decode().splitlines()
    assert lines[-2:] == ["+a line", "# cut: more than 1000 bytes differ from the commit"]
    assert found(repository).changed == ["lib/a.py", "model_def.py"]


# --- without a commit to record


def test_without_a_repository_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    assert asked(tmp_path) is None


def test_before_the_first_commit_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    run(tmp_path, "init", "--quiet", ".")
    assert asked(tmp_path) is None


def test_a_repository_that_knows_nothing_of_the_code_tells_nothing(repository: Path) -> None:
    """For example, a repository of the settings in the home folder."""
    (repository / "work").mkdir()
    (repository / "work" / "a.py").write_text("")
    assert asked(repository / "work") is None


def test_without_git_nothing_is_told(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert asked(repository) is None


def test_a_git_that_gives_no_answer_is_not_waited_for(
    repository: Path, monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    monkeypatch.setattr(snapshot, "GIT_TIMEOUT_S", 0.1)
    stub("git", "exec sleep 60")
    assert asked(repository) is None


# --- repositories of others


@pytest.mark.parametrize(
    "settings",
    [
        {"core.fsmonitor": "{}"},
        {"diff.external": "{}"},
        {"filter.evil.clean": "{}", "filter.evil.required": "true"},
        {"filter.evil.process": "{}", "filter.evil.required": "true"},
        {"diff.evil.command": "{}"},
        {"diff.evil.textconv": "{}"},
        {"core.pager": "{}", "pager.diff": "{}"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_no_program_of_a_repository_is_run(repository: Path, tmp_path: Path, settings: dict[str, str]) -> None:
    program = tmp_path / "evil"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/has-run\ncat\n")
    program.chmod(0o755)
    (repository / ".gitattributes").write_text("*.py filter=evil diff=evil\n")
    for key, value in settings.items():
        run(repository, "config", key, value.format(program))
    (repository / "model_def.py").write_text("edited\n")
    assert found(repository).changed == ["model_def.py"]
    assert b"+edited\n" in found(repository).diff
    assert not (tmp_path / "has-run").exists()


def test_a_filter_that_cannot_be_switched_off_is_not_risked(repository: Path) -> None:
    run(repository, "config", "filter.a=b.clean", "touch has-run")
    assert asked(repository) is None


def test_a_filter_of_the_users_own_is_used(repository: Path, tmp_path: Path) -> None:
    """git-lfs is such a filter: without it, every large file would differ."""
    (tmp_path / ".gitconfig").write_text("[filter \"own\"]\n\tclean = sed 's/FIRST/first/'\n")
    (repository / ".gitattributes").write_text("*.py filter=own\n")
    (repository / "model_def.py").write_text("model_def.py, FIRST\n")
    assert found(repository).changed == []


def test_the_repository_is_the_contexts_whatever_the_environment_says(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIT_DIR is set in a hook of another repository, for example."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert asked(repository) is not None


def test_nothing_is_written_into_the_repository(repository: Path) -> None:
    """The repository may be in use, or belong to another user."""
    index = repository / ".git" / "index"
    os.utime(repository / "model_def.py", (0, 0))
    before = index.read_bytes()
    found(repository)
    assert index.read_bytes() == before
