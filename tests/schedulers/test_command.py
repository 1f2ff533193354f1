from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_det.schedulers import scheduler
from hpc_det.schedulers.scheduler import CommandError, NoAnswer, outside_any_job, refusal, run_command, temporary_folder
from tests.facts import refused
from tests.stub import Stub

pytestmark = pytest.mark.integration


def test_the_answer_is_what_the_command_printed(stub: Stub) -> None:
    stub("tool", "printf '%s|' \"$@\"; echo noise >&2")
    assert run_command(["tool", "two words", "$(touch X)"]) == "two words|$(touch X)|"


def test_a_refusal_says_which_command_its_code_and_its_words(stub: Stub) -> None:
    stub("tool", "echo first >&2; echo second >&2; exit 3")
    with refused(CommandError, "tool", 3, "first", "second"):
        run_command(["tool"])


def test_words_on_stdout_are_reported_where_stderr_has_none(stub: Stub) -> None:
    stub("tool", "echo to stdout; exit 1")
    with refused(CommandError, "tool", 1, "to stdout"):
        run_command(["tool"])


def test_a_command_that_fails_silently_is_said_to_be_silent(stub: Stub) -> None:
    stub("tool", "exit 1")
    with refused(CommandError, "tool", 1):
        run_command(["tool"])


def test_an_absent_command_is_named_with_the_remedy() -> None:
    with refused(CommandError, "no-such-tool", "PATH", "login node"):
        run_command(["no-such-tool"])


def test_a_command_that_gives_no_answer_is_ended(stub: Stub) -> None:
    stub("tool", "exec sleep 60")
    before = time.monotonic()
    with refused(CommandError, "tool", "0.1 s"):
        run_command(["tool"], timeout_s=0.1)
    assert time.monotonic() - before < 60


def test_a_command_that_is_no_program_is_an_error(stub: Stub) -> None:
    stub("tool", "exit").write_bytes(b"\0")
    with refused(CommandError, "tool"):
        run_command(["tool"])


def test_an_answer_that_is_no_text_is_no_crash(stub: Stub) -> None:
    stub("tool", r"printf 'a\377'")
    assert run_command(["tool"]) == "a\ufffd"


def test_a_submission_has_a_temporary_folder_that_can_be_written(tmp_path: Path) -> None:
    for env in ({}, {"TMPDIR": str(tmp_path)}):
        assert outside_any_job(env) == env
    for name in ("TMPDIR", "PBS_TMPDIR"):
        (written,) = set(temporary_folder({name: str(tmp_path / "gone")}).values())
        assert Path(written).is_dir()
    of_a_job = {"PBS_TMPDIR": str(tmp_path), "TMPDIR": str(tmp_path / "gone")}
    assert Path(outside_any_job(of_a_job)["TMPDIR"]).is_dir()


def test_without_any_temporary_folder_the_working_folder_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_TEMPORARY", ("/nonexistent",))
    monkeypatch.chdir(tmp_path)
    assert temporary_folder({}) == {"TMPDIR": str(tmp_path)}


def test_a_command_that_asks_gets_no_answer(stub: Stub) -> None:
    stub("tool", "read -r answer || echo nobody there")
    assert run_command(["tool"]) == "nobody there\n"


@pytest.mark.parametrize(
    ("said", "may_have_acted"),
    [
        ("sbatch: error: Unable to contact slurm controller (connect failure)", False),
        ("qsub: cannot connect to server pbs (errno=111)", False),
        ("Batch job submission failed: Socket timed out on send/recv operation", True),
        ("error: Socket timed out; error: backup: Unable to contact slurm controller (connect failure)", True),
    ],
)
def test_a_request_that_one_of_several_servers_may_have_had_may_have_been_served(
    said: str, may_have_acted: bool
) -> None:
    error = refusal("sbatch failed", said)
    assert isinstance(error, NoAnswer)
    assert error.may_have_acted is may_have_acted


def test_a_refusal_is_an_answer() -> None:
    assert not isinstance(refusal("sbatch failed", "Batch job submission failed: Invalid partition name"), NoAnswer)
