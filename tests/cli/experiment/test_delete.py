"""experiment delete: complete, only for finished experiments, and no number is used twice."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.object_store import Remote
from hpc_det.node.json_files import write_json
from hpc_det.schedulers.scheduler import JobState
from hpc_det.store.experiments import ExperimentStore
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import each_names, unnamed


def ended(root: Path) -> Life:
    life = Life.submitted(root)
    life.begins()
    life.saves(400)
    life.finishes()
    return life


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "experiments").iterdir())


def test_ended_experiments_go_as_a_whole(hpc_det: Command, root: Path) -> None:
    for _ in range(3):
        ended(root)
    assert hpc_det("e", "delete", "1,2", "--yes").succeeds("experiment 1", "experiment 2")
    assert left(root) == [".deleted-2", "3"]
    assert hpc_det("e", "describe", "1").code == 2


def test_the_number_of_the_newest_does_not_come_again(hpc_det: Command, root: Path) -> None:
    ended(root)
    ended(root)
    hpc_det("e", "delete", "2", "--yes")
    hpc_det("e", "delete", "1", "--yes")
    store = ExperimentStore(root)
    assert (left(root), store.next_id(), store.create().id) == ([".deleted-2"], 3, 3)


def test_what_has_not_ended_is_refused_and_nothing_goes(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    ended(root)
    Life.submitted(root).begins()
    assert hpc_det("e", "delete", "1,2", "--yes").fails(2, "experiment 2", "RUNNING", "hpc-det experiment kill 2")
    assert left(root) == ["1", "2"]


def test_damaged_files_name_a_remedy_beside_all_other_problems(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    torn = ended(root)
    for entry in torn.folder.search.iterdir():
        entry.write_text("")
    Life.submitted(root).begins()
    code, _, err = hpc_det("e", "delete", "1,2", "--yes")
    damaged, running = err.splitlines()
    assert (code, left(root)) == (2, ["1", "2"])
    remedy = ["hpc-det job list", f"remove {torn.folder.path}"]
    assert not unnamed(damaged, "experiment 1", f"{torn.folder.search}/000000000.json", *remedy)
    assert not unnamed(running, "experiment 2", "RUNNING")


@pytest.mark.parametrize(("answer", "code", "there"), [("n\n", 1, ["1"]), ("y\n", 0, [".deleted-1"])])
def test_it_asks_before(
    hpc_det: Command, root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, there: list[str]
) -> None:
    ended(root)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    done = hpc_det("e", "delete", "1")
    assert (done.code, left(root)) == (code, there)
    assert not unnamed(done.out + done.err, "Delete experiment 1", "1 checkpoint", "7 B")
    assert ("nothing was changed" in done.err) == (code == 1)


def test_nobody_is_there_to_answer(hpc_det: Command, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(root)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = hpc_det("e", "delete", "1")
    assert (done.code, left(root)) == (2, ["1"])
    assert not unnamed(done.err, "--yes")


def test_its_checkpoints_go_wherever_they_lie(hpc_det: Command, root: Path, tmp_path: Path) -> None:
    elsewhere, bucket = tmp_path / "scratch" / "1-1f0c", tmp_path / "bucket" / "2-1f0c"
    first, second = Life.submitted(root), Life.submitted(root)
    write_json(first.folder.storage, {"folder": str(elsewhere)})
    write_json(second.folder.storage, {"url": f"file://{bucket}"})
    for life in (first, second):
        life.begins()
        life.saves(400)
        life.finishes()
    assert len(committed(elsewhere / "1")) == 1
    Remote(f"file://{bucket}/1", {"auto_mkdir": True}).upload(committed(second.trial.checkpoints)[0])
    assert hpc_det("e", "delete", "1,2", "--yes").code == 0
    assert list((tmp_path / "scratch").iterdir()) == list((tmp_path / "bucket").iterdir()) == []


def refuse(*_: object) -> None:
    raise PermissionError("no")


def silent(life: Life, bucket: Path) -> str:
    """Move a copy of its checkpoint to a store; return the message if that store does not answer."""
    write_json(life.folder.storage, {"url": f"file://{bucket}"})
    Remote(f"file://{bucket}/1", {"auto_mkdir": True}).upload(committed(life.trial.checkpoints)[0])
    return (
        f"checkpoint_storage: file://{bucket}: PermissionError: no\n"
        f"hpc-det: experiment {life.id} is deleted except for file://{bucket}; "
        "`hpc-det experiment cleanup` tries again\n"
    )


def test_a_store_that_does_not_answer_is_reported_and_tried_again(
    hpc_det: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, bucket = ended(root), tmp_path / "bucket"
    message = silent(life, bucket)
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "remove_all", refuse)
        done = hpc_det("e", "delete", "1", "--yes")
    assert (done.code, done.err) == (1, f"hpc-det: {message}")
    assert hpc_det("e", "list").out.count("\n") == 1
    assert hpc_det("e", "cleanup").code == 0
    assert (bucket.exists(), list((root / "experiments" / ".deleted-1").iterdir())) == (False, [])


def test_a_store_that_never_answers_keeps_nothing_else_from_its_end(
    hpc_det: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = ended(root), ended(root), ended(root)
    message = silent(first, tmp_path / "bucket")
    store = ExperimentStore(root)
    for life in (first, second):
        life.folder.path.rename(store.deleted(life.id))
    monkeypatch.setattr(Remote, "remove_all", refuse)
    done = hpc_det("e", "delete", "3", "--yes")
    assert (done.code, unnamed(done.out, "experiment 3")) == (0, [])
    assert done.err.replace("\n", "\nhpc-det: ", 1) == f"hpc-det: note: {message}"
    assert left(root) == [".deleted-1", ".deleted-3"]
    done = hpc_det("e", "cleanup")
    assert (done.code, done.err) == (1, f"hpc-det: {message}")
    assert store.cleaned.exists(), "the next `create` need not try again"


def test_what_a_killed_deletion_has_left_goes_with_the_next(hpc_det: Command, root: Path) -> None:
    first, second = ended(root), ended(root)
    first.folder.path.rename(ExperimentStore(root).deleted(1))
    assert hpc_det("e", "delete", str(second.id), "--yes").code == 0
    assert left(root) == [".deleted-2"]


def test_two_that_delete_the_same_at_once_leave_nothing(
    hpc_det: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has just deleted the next file of a folder."""
    rmtree = shutil.rmtree

    def overtaken(folder: Path) -> None:
        monkeypatch.setattr("shutil.rmtree", rmtree)
        raise FileNotFoundError(folder / "gone")

    ended(root).folder.path.rename(ExperimentStore(root).deleted(1))
    monkeypatch.setattr("shutil.rmtree", overtaken)
    assert hpc_det("e", "cleanup") == (0, "", "")
    assert list(ExperimentStore(root).deleted(1).iterdir()) == []


def test_those_who_begin_with_its_weights_are_named(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    source = ended(root)
    checkpoint = committed(source.trial.checkpoints)[0].path
    for _ in range(2):
        write_json(Life.submitted(root).folder.warm_start, {"checkpoint": str(checkpoint)})
    damaged = Life.submitted(root).folder
    write_json(damaged.warm_start, {"checkpoint": str(checkpoint)})
    (damaged.search / "000000000.json").write_text("")
    scheduler.states = [JobState.QUEUED]
    done = hpc_det("e", "delete", "1", "--yes")
    assert (done.code, unnamed(done.out, "experiment 1")) == (0, []), "a damaged one hides no other"
    each_names(done.err.splitlines(), *(["warning", f"experiment {n}", "QUEUED", checkpoint] for n in (2, 3)))


def test_files_go_once_the_experiment_has_ended(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.trial.tensorboard.mkdir()
    (life.trial.tensorboard / "events").write_bytes(b"12345")
    code, _, err = hpc_det("e", "delete-tb-files", 1, "--yes")
    assert (code, unnamed(err, "experiment 1", "RUNNING")) == (2, [])
    assert life.trial.tensorboard.exists()
    life.finishes()
    said = hpc_det("e", "delete-tb-files", 1, "--yes")
    assert said.succeeds("1 TensorBoard file", "experiment 1")
    assert not life.trial.tensorboard.exists()
    assert hpc_det("e", "delete-tb-files", 1, "--yes").succeeds("0 TensorBoard files", "experiment 1")
