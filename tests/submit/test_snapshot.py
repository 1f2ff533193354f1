from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.config.entrypoint import Context
from hpc_det.errors import UsageError
from hpc_det.submit.snapshot import LIMIT_BYTES, copy_snapshot, snapshot_of
from tests.facts import refused, unnamed


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    return folder


def write(context: Path, *names: str) -> None:
    for name in names:
        path = context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def kept(context: Path) -> list[str]:
    return [str(path) for path in snapshot_of(Context(context)).files]


def test_everything_is_taken_in_a_fixed_order(context: Path) -> None:
    write(context, "z.py", "a.py", "pkg/b.py", ".hidden", "a b/$(x).txt")
    assert kept(context) == [".hidden", "a b/$(x).txt", "a.py", "pkg/b.py", "z.py"]


def test_what_nobody_means_to_submit_is_always_left_out(context: Path) -> None:
    write(context, "a.py", "__pycache__/a.cpython-311.pyc", "pkg/__pycache__/b.pyc", "pkg/b.pyc", "pkg/b.pyo")
    write(context, ".git/config", ".mypy_cache/x", ".vscode/x", ".idea/x", ".detignore", "sub/.git/config")
    write(context, "a$py.class", "pkg/.detignore", "terraform.tfstate", "sub/x.tfstate.backup", ".terraform/plugin")
    assert kept(context) == ["a.py"]


def test_always_is_always(context: Path) -> None:
    write(context, "a.py", ".git/config", "a.pyc")
    (context / ".detignore").write_text("!.git/\n!*.pyc\n!.detignore\n")
    assert kept(context) == ["a.py"]


def test_detignore_is_read_as_a_gitignore(context: Path) -> None:
    write(context, "a.py", "pkg/b.py", "data/big.bin", "pkg/data/big.bin", "out/x", "pkg/out/x")
    write(context, "notes.log", "keep.log")
    (context / ".detignore").write_text("# a comment\n\ndata/\n*.log\n!keep.log\n/out\n")
    assert kept(context) == ["a.py", "keep.log", "pkg/b.py", "pkg/out/x"]


def test_detignore_cannot_bring_back_a_file_from_a_folder_that_is_left_out(context: Path) -> None:
    write(context, "data/a", "data/b")
    (context / ".detignore").write_text("data/\n!data/a\n")
    assert kept(context) == []


@pytest.mark.parametrize(
    ("written", "facts"),
    [
        (b"\xff\xfe", ["UTF-8"]),
        (b"!", ["'!'"]),
        (None, ["Is a directory"]),
    ],
)
def test_a_detignore_that_is_none_is_named(context: Path, written: bytes | None, facts: list[str]) -> None:
    file = context / ".detignore"
    if written is None:
        file.mkdir()
    else:
        file.write_bytes(written)
    with refused(UsageError, file, "gitignore", *facts):
        snapshot_of(Context(context))


def test_a_folder_that_is_ignored_is_not_looked_into(context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a folder may contain years of data."""
    write(context, "a.py", "data/2025/a", "pkg/data/b")
    (context / ".detignore").write_text("data/\n")
    looked_into, scandir = list[str](), os.scandir

    def look_into(folder: str) -> Iterator[os.DirEntry[str]]:
        looked_into.append(os.path.basename(folder))
        return scandir(folder)

    monkeypatch.setattr("os.scandir", look_into)
    assert kept(context) == ["a.py"]
    assert looked_into == ["context", "pkg"]


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def test_the_limit_itself_is_allowed(context: Path) -> None:
    sparse(context / "data", LIMIT_BYTES)
    assert kept(context) == ["data"]


def test_one_byte_above_the_limit_is_too_much(context: Path) -> None:
    sparse(context / "data", LIMIT_BYTES)
    sparse(context / "a.py", 1)
    with refused(UsageError, context, LIMIT_BYTES + 1):
        snapshot_of(Context(context))


def test_above_the_limit_the_ten_largest_files_are_named(context: Path) -> None:
    for number in range(1, 13):
        sparse(context / f"f{number:02}", 9_000_000 + number)
    with pytest.raises(UsageError) as error:
        snapshot_of(Context(context))
    message = str(error.value)
    largest = ", ".join(f"f{number:02} ({9_000_000 + number})" for number in range(12, 2, -1))
    assert not unnamed(message, context, 108000078, 99614720, "95 MiB", ".detignore", largest)


def test_what_is_ignored_does_not_count(context: Path) -> None:
    sparse(context / "data", LIMIT_BYTES + 1)
    write(context, "a.py")
    (context / ".detignore").write_text("data\n")
    assert kept(context) == ["a.py"]


def test_a_link_that_leads_nowhere_is_left_out(context: Path) -> None:
    """Editors create such links for open files."""
    write(context, "a.py")
    (context / ".#a.py").symlink_to("ada@login.4711")
    assert kept(context) == ["a.py"]


def test_the_copy_holds_the_same_bytes_and_modes_and_nothing_else(context: Path, tmp_path: Path) -> None:
    write(context, "run.sh", "pkg/a.py", "data/big")
    (context / "run.sh").chmod(0o755)
    (context / ".detignore").write_text("data/\n")
    target = tmp_path / "code"
    copy_snapshot(snapshot_of(Context(context)), target)
    copied = sorted(path for path in target.rglob("*") if path.is_file())
    assert [str(path.relative_to(target)) for path in copied] == ["pkg/a.py", "run.sh"]
    assert (target / "pkg" / "a.py").read_text() == "pkg/a.py"
    assert (target / "run.sh").stat().st_mode & 0o111


def test_a_linked_file_is_copied_as_what_it_shows(context: Path, tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text("shared")
    (context / "lib.py").symlink_to(tmp_path / "shared.py")
    target = tmp_path / "code"
    copy_snapshot(snapshot_of(Context(context)), target)
    assert not (target / "lib.py").is_symlink()
    assert (target / "lib.py").read_text() == "shared"


def test_a_link_to_a_folder_is_refused_unless_it_is_ignored(context: Path, tmp_path: Path) -> None:
    """Determined copied an empty folder instead."""
    (context / "data").symlink_to(tmp_path, target_is_directory=True)
    with refused(UsageError, context / "data", ".detignore"):
        snapshot_of(Context(context))
    (context / ".detignore").write_text("data/\n")
    assert kept(context) == []


def test_a_link_to_itself_is_refused_unless_it_is_ignored_and_a_dangling_one_is_left_out(context: Path) -> None:
    (context / "loop").symlink_to("loop")
    (context / ".#lock").symlink_to("nowhere")
    with refused(UsageError, context / "loop", ".detignore"):
        snapshot_of(Context(context))
    (context / ".detignore").write_text("loop\n")
    assert kept(context) == []


def test_an_edit_after_submission_does_not_reach_the_copy(context: Path, tmp_path: Path) -> None:
    write(context, "a.py")
    copy_snapshot(snapshot_of(Context(context)), tmp_path / "code")
    (context / "a.py").write_text("edited")
    assert (tmp_path / "code" / "a.py").read_text() == "a.py"


def test_no_code_at_all_is_an_empty_folder_where_the_job_can_run(context: Path, tmp_path: Path) -> None:
    copy_snapshot(snapshot_of(Context(context)), tmp_path / "code")
    assert list((tmp_path / "code").iterdir()) == []


def test_empty_folders_arrive_and_so_do_those_that_detignore_empties(context: Path, tmp_path: Path) -> None:
    """Determined copies them, too; scripts write into them."""
    write(context, "a.py", "out/run-1.log", "data/big.bin", "pkg/b.py")
    (context / "checkpoints" / "deep").mkdir(parents=True)
    (context / "__pycache__").mkdir()
    (context / ".detignore").write_text("*.log\n/data\n")
    copy_snapshot(snapshot_of(Context(context)), tmp_path / "code")
    copied = sorted(str(path.relative_to(tmp_path / "code")) for path in (tmp_path / "code").rglob("*"))
    assert copied == ["a.py", "checkpoints", "checkpoints/deep", "out", "pkg", "pkg/b.py"]


def test_an_included_folder_arrives_even_if_it_is_empty(context: Path, tmp_path: Path) -> None:
    (tmp_path / "lib" / "cache").mkdir(parents=True)
    copy_snapshot(snapshot_of(Context(context, (tmp_path / "lib",))), tmp_path / "code")
    assert (tmp_path / "code" / "lib" / "cache").is_dir()


def test_an_empty_folder_and_an_included_one_of_its_name_are_both_named(context: Path, library: Path) -> None:
    (context / "library").mkdir()
    with refused(UsageError, f"--include {library}", f"{context}/library"):
        snapshot_of(Context(context, (library,)))


def test_a_file_that_has_gone_meanwhile_is_named(context: Path, tmp_path: Path) -> None:
    write(context, "a.py")
    snapshot = snapshot_of(Context(context))
    (context / "a.py").unlink()
    with refused(UsageError, "a.py", "No such file"):
        copy_snapshot(snapshot, tmp_path / "code")


# --- what is included


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return a folder outside the context directory, with its own .detignore."""
    folder = tmp_path / "elsewhere" / "library"
    folder.mkdir(parents=True)
    write(folder, "b.py", "deep/c.py", "big/data", "__pycache__/b.pyc")
    (folder / ".detignore").write_text("big/\n")
    return folder


def test_included_files_and_folders_have_their_own_names_beside_the_code(
    context: Path, library: Path, tmp_path: Path
) -> None:
    write(context, "a.py")
    write(tmp_path, "other/settings.json")
    snapshot = snapshot_of(Context(context, (library, tmp_path / "other" / "settings.json")))
    assert [str(place) for place in snapshot.files] == ["a.py", "library/b.py", "library/deep/c.py", "settings.json"]
    copy_snapshot(snapshot, tmp_path / "code")
    assert (tmp_path / "code" / "library" / "deep" / "c.py").read_text() == "deep/c.py"


def test_the_contexts_detignore_is_not_that_of_what_is_included(context: Path, library: Path, tmp_path: Path) -> None:
    write(tmp_path, "other/b.py")
    (context / ".detignore").write_text("*.py\n")
    assert len(snapshot_of(Context(context, (library, tmp_path / "other" / "b.py"))).files) == 3


def test_two_things_of_one_name_are_both_named(context: Path, library: Path, tmp_path: Path) -> None:
    write(context, "library/x.py")
    write(tmp_path, "other/library")
    with refused(UsageError, f"--include {library}", f"{context}/library", "'library'"):
        snapshot_of(Context(context, (library,)))
    (context / ".detignore").write_text("/library\n")
    other = tmp_path / "other" / "library"
    with refused(UsageError, f"--include {other}", library):
        snapshot_of(Context(context, (library, other)))


def test_what_is_included_counts_for_the_limit(context: Path, library: Path) -> None:
    sparse(context / "a", LIMIT_BYTES)
    with refused(UsageError, context, library, "library/deep/c.py"):
        snapshot_of(Context(context, (library,)))


def test_the_root_has_no_name_beside_the_code(context: Path) -> None:
    with refused(UsageError, "--include /"):
        snapshot_of(Context(context, (Path("/"),)))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_slow_copy_shows_its_progress_on_a_terminal_only(
    is_terminal: bool,
    context: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(context, *(f"{number}.py" for number in range(5)))
    monkeypatch.setattr("hpc_det.submit.snapshot.PROGRESS_AFTER_S", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    copy_snapshot(snapshot_of(Context(context)), tmp_path / "copy")
    assert sorted(path.read_text() for path in (tmp_path / "copy").iterdir()) == [f"{number}.py" for number in range(5)]
    assert bool(capsys.readouterr().err) == is_terminal
