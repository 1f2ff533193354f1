from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.submit.snapshot import LIMIT_BYTES, copy_snapshot, snapshot_files


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
    return [str(path) for path in snapshot_files(context)]


def test_everything_is_taken_in_a_fixed_order(context: Path) -> None:
    write(context, "z.py", "a.py", "pkg/b.py", ".hidden", "a b/$(x).txt")
    assert kept(context) == [".hidden", "a b/$(x).txt", "a.py", "pkg/b.py", "z.py"]


def test_what_nobody_means_to_submit_is_always_left_out(context: Path) -> None:
    write(context, "a.py", "__pycache__/a.cpython-311.pyc", "pkg/__pycache__/b.pyc", "pkg/b.pyc", "pkg/b.pyo")
    write(context, ".git/config", ".mypy_cache/x", ".vscode/x", ".idea/x", ".detignore", "sub/.git/config")
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


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def test_the_limit_itself_is_allowed(context: Path) -> None:
    sparse(context / "data", LIMIT_BYTES)
    assert kept(context) == ["data"]


def test_above_the_limit_the_ten_largest_files_are_named(context: Path) -> None:
    for number in range(1, 13):
        sparse(context / f"f{number:02}", 9_000_000 + number)
    with pytest.raises(UsageError) as error:
        snapshot_files(context)
    message = str(error.value)
    assert message.startswith(f"{context}: the context directory holds 108000078 bytes, the limit is 99614720 (95 MiB)")
    assert ".detignore" in message
    largest = ", ".join(f"f{number:02} ({9_000_000 + number})" for number in range(12, 2, -1))
    assert message.endswith(f"Largest: {largest}")


def test_what_is_ignored_does_not_count(context: Path) -> None:
    sparse(context / "data", LIMIT_BYTES + 1)
    write(context, "a.py")
    (context / ".detignore").write_text("data\n")
    assert kept(context) == ["a.py"]


def test_a_link_that_leads_nowhere_is_left_out(context: Path) -> None:
    """Editors leave such links beside files that are open."""
    write(context, "a.py")
    (context / ".#a.py").symlink_to("ada@login.4711")
    assert kept(context) == ["a.py"]


def test_the_copy_holds_the_same_bytes_and_modes_and_nothing_else(context: Path, tmp_path: Path) -> None:
    write(context, "run.sh", "pkg/a.py", "data/big")
    (context / "run.sh").chmod(0o755)
    (context / ".detignore").write_text("data/\n")
    target = tmp_path / "code"
    copy_snapshot(context, snapshot_files(context), target)
    copied = sorted(path for path in target.rglob("*") if path.is_file())
    assert [str(path.relative_to(target)) for path in copied] == ["pkg/a.py", "run.sh"]
    assert (target / "pkg" / "a.py").read_text() == "pkg/a.py"
    assert (target / "run.sh").stat().st_mode & 0o111


def test_a_linked_file_is_copied_as_what_it_shows(context: Path, tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text("shared")
    (context / "lib.py").symlink_to(tmp_path / "shared.py")
    target = tmp_path / "code"
    copy_snapshot(context, snapshot_files(context), target)
    assert not (target / "lib.py").is_symlink()
    assert (target / "lib.py").read_text() == "shared"


def test_an_edit_after_submission_does_not_reach_the_copy(context: Path, tmp_path: Path) -> None:
    write(context, "a.py")
    copy_snapshot(context, snapshot_files(context), tmp_path / "code")
    (context / "a.py").write_text("edited")
    assert (tmp_path / "code" / "a.py").read_text() == "a.py"


def test_no_code_at_all_is_an_empty_folder_where_the_job_can_run(context: Path, tmp_path: Path) -> None:
    copy_snapshot(context, snapshot_files(context), tmp_path / "code")
    assert list((tmp_path / "code").iterdir()) == []
