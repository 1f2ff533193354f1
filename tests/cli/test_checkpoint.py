"""hpc-det checkpoint list, describe, download and rm, by uuid, experiment or trial."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint import committed as module
from hpc_det.checkpoint.committed import Committed, committed, newest_good
from hpc_det.checkpoint.committed_folder import FolderFormat, delete
from hpc_det.checkpoint.damaged import set_aside
from hpc_det.checkpoint.object_store import Remote
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.node.json_files import write_json
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, random_search
from tests.facts import each_names, unnamed


@pytest.fixture
def life(root: Path) -> Life:
    """Return experiment 1, which has finished: two trials with checkpoints at 100 and 400 batches each."""
    life = Life.submitted(root, **random_search(2))
    life.begins()
    for trial, values in ((1, (0.9, 0.8)), (2, (0.7, 0.95))):
        for steps, accuracy in zip((100, 400), values, strict=True):
            life.reports("validation", steps, {"accuracy": accuracy, "loss": steps / 100}, trial=trial)
            life.saves(steps, trial=trial)
        life.finishes()
    return life


def at(life: Life, trial: int, steps: int) -> Committed:
    found = committed(life.folder.trial(trial).checkpoints)
    return next(checkpoint for checkpoint in found if checkpoint.steps == steps)


def copied(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- list


def test_the_list_shows_trial_batches_state_metric_uuid_and_size(hpc_det: Command, life: Life) -> None:
    heading, *rows = hpc_det("e", "list-checkpoints", "1").out.splitlines()
    assert heading.split() == ["TRIAL", "BATCHES", "STATE", "VALIDATION", "UUID", "SIZE"]
    best = at(life, 1, 100)
    assert rows[1].split() == ["1", "100", "COMPLETED", "accuracy", "0.9", best.uuid, "7", "B"]
    assert [row.split()[:2] for row in rows] == [["1", "400"], ["1", "100"], ["2", "400"], ["2", "100"]]


def test_the_best_come_first_by_the_searchers_metric(hpc_det: Command, life: Life) -> None:
    records = json.loads(hpc_det("e", "list-checkpoints", "1", "--best", "3", "--json").out)
    assert [(record["trial"], record["batches"], record["value"]) for record in records] == [
        (2, 400, 0.95),
        (1, 100, 0.9),
        (1, 400, 0.8),
    ]
    (row,) = csv.DictReader(io.StringIO(hpc_det("t", "list-checkpoints", "1/2", "--best", "1", "--csv").out))
    assert (row["uuid"], row["metric"], row["value"], row["size_bytes"]) == (
        at(life, 2, 400).uuid,
        "accuracy",
        "0.95",
        "7",
    )


def test_what_has_lost_files_is_damaged(hpc_det: Command, life: Life) -> None:
    (at(life, 1, 400).path / "state_dict.pth").unlink()
    assert hpc_det("t", "list-checkpoints", "1/1").out.splitlines()[1].split()[2] == "DAMAGED"


def test_what_is_in_a_store_alone_is_listed_too(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    moved_to_a_bucket(life, tmp_path / "bucket")
    records = json.loads(hpc_det("e", "list-checkpoints", "1", "--json").out)
    assert [(record["state"], record["value"]) for record in records] == [
        ("COMPLETED", value) for value in (0.8, 0.9, 0.95, 0.7)
    ]


# --- set aside


@pytest.fixture
def aside(life: Life) -> Committed:
    """Return a checkpoint that a resume of its trial has found damaged and set aside."""
    checkpoint = at(life, 2, 400)
    set_aside(checkpoint.path, checkpoint.steps, ["state_dict.pth: crc32 differs"])
    return checkpoint


def test_what_was_set_aside_is_listed_and_no_download_takes_it(hpc_det: Command, life: Life, aside: Committed) -> None:
    records = json.loads(hpc_det("t", "list-checkpoints", "1/2", "--json").out)
    assert [(record["state"], record["batches"], record["uuid"]) for record in records] == [
        ("COMPLETED", 100, at(life, 2, 100).uuid),
        ("SET_ASIDE", 400, aside.uuid),
    ]
    assert len(json.loads(hpc_det("t", "list-checkpoints", "1/2", "--best", "9", "--json").out)) == 1


def test_describe_tells_what_was_set_aside_why_and_where_it_is(hpc_det: Command, life: Life, aside: Committed) -> None:
    (place,) = aside.path.parent.glob(f".*{aside.uuid}")
    for record in (
        json.loads(hpc_det("t", "describe", "1/2", "--json").out),
        json.loads(hpc_det("e", "describe", "1", "--json").out)["trials"][1],
    ):
        (found,) = record["set_aside"]
        assert (found["uuid"], found["batches"], found["place"]) == (aside.uuid, 400, str(place))
        assert found["problems"] == ["state_dict.pth: crc32 differs"]
        assert "steps" not in found
    for shown in (hpc_det("t", "describe", "1/2").out, hpc_det("e", "describe", "1").out):
        assert str(place) in shown
    record = json.loads(hpc_det("c", "describe", aside.uuid[:9], "--json").out)
    assert (record["state"], record["places"]) == ("SET_ASIDE", [str(place)])


def test_rm_removes_what_was_set_aside(hpc_det: Command, life: Life, aside: Committed) -> None:
    assert hpc_det("c", "rm", aside.uuid, "--yes").code == 0
    assert not list(aside.path.parent.glob(".*"))
    assert at(life, 2, 100)


# --- describe


def test_describe_tells_whose_it_is_where_it_lies_and_what_was_validated(hpc_det: Command, life: Life) -> None:
    checkpoint = at(life, 2, 400)
    record = json.loads(hpc_det("checkpoint", "describe", checkpoint.uuid, "--verify", "--json").out)
    assert record.pop("time")
    assert record == {
        "uuid": checkpoint.uuid,
        "experiment": 1,
        "trial": 2,
        "batches": 400,
        "state": "COMPLETED",
        "size_bytes": 7,
        "places": [str(checkpoint.path)],
        "validation": {"accuracy": 0.95, "loss": 4.0},
        "hyperparameters": life.search.sample(2).hparams,
        "metadata": {"steps_completed": 400},
        "files": [{"name": "state_dict.pth", "size_bytes": 7}],
        "removed": [],
        "damage": [],
    }
    shown = hpc_det("c", "describe", f"{checkpoint.uuid},{at(life, 1, 100).uuid}").out
    assert "  Trial:      1/2\n" in shown
    assert "  Validation: accuracy 0.95, loss 4\n" in shown
    assert "         7 B  state_dict.pth" in shown
    assert "Damage" not in shown


def test_damage_is_told_and_the_exit_code_says_so(hpc_det: Command, life: Life) -> None:
    checkpoint = at(life, 1, 400)
    (checkpoint.path / "state_dict.pth").write_bytes(b"WEIGHTS")
    assert hpc_det("c", "describe", checkpoint.uuid).code == 0
    code, out, err = hpc_det("c", "describe", checkpoint.uuid, "--verify")
    assert code == 1
    assert "Damage:     state_dict.pth: crc32 " in out
    assert not unnamed(err, f"checkpoint {checkpoint.uuid}", "state_dict.pth: crc32")


def test_the_first_characters_of_a_uuid_will_do(hpc_det: Command, life: Life) -> None:
    checkpoint = at(life, 1, 100)
    assert json.loads(hpc_det("c", "describe", checkpoint.uuid[:8], "--json").out)["uuid"] == checkpoint.uuid


@pytest.mark.parametrize("uuid", ["abc", "../../../", ".partial-"])
def test_what_can_be_no_uuid_is_refused(hpc_det: Command, life: Life, uuid: str) -> None:
    assert hpc_det("c", "describe", uuid).fails(2, repr(uuid), "UUID", "4 characters")


def test_a_uuid_that_nobody_has_names_where_to_look(hpc_det: Command, life: Life, root: Path) -> None:
    assert hpc_det("c", "describe", "nobody").fails(2, root, "'nobody'", "hpc-det experiment list-checkpoints ID")


def test_a_beginning_that_several_share_names_them(hpc_det: Command, life: Life) -> None:
    for trial in (1, 2):
        life.saves(500, trial=trial, uuid=f"same-{trial}")
    code, _, err = hpc_det("c", "describe", "same")
    assert code == 2
    assert not unnamed(err, "'same'", "same-1", "trial 1/1", "same-2", "trial 1/2")


def test_a_uuid_is_found_without_a_look_into_other_trials(
    hpc_det: Command, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    checkpoint, real = at(life, 1, 100), FolderFormat.read

    def noted(kind: FolderFormat[FileEntry], folder: Path) -> dict[str, Any]:
        read.append(folder)
        return real(kind, folder)

    monkeypatch.setattr(FolderFormat, "read", noted)
    assert hpc_det("c", "describe", checkpoint.uuid).code == 0
    assert {folder.parent for folder in read} == {checkpoint.path.parent}


def test_a_torn_manifest_is_told(hpc_det: Command, life: Life) -> None:
    checkpoint = at(life, 1, 400)
    (checkpoint.path / "manifest.json").write_text("{")
    code, _, err = hpc_det("c", "describe", checkpoint.uuid)
    assert code == 1
    assert f"{checkpoint.path / 'manifest.json'}: damaged" in err


# --- download


def test_the_best_checkpoint_of_an_experiment_is_copied_whole(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    best = at(life, 2, 400)
    code, out, _ = hpc_det("e", "download", "1", "-o", tmp_path / "new" / "best")
    assert (code, out) == (0, f"{tmp_path}/new/best/{best.uuid}\n")
    assert copied(Path(out.strip())) == copied(best.path)
    assert [path.name for path in (tmp_path / "new" / "best").iterdir()] == [best.uuid]


@pytest.mark.parametrize(
    ("arguments", "which"),
    [
        (["--best"], [(2, 400)]),
        (["--top-n", "2"], [(2, 400), (1, 100)]),
        (["--top-n", "9", "--smaller-is-better"], [(2, 100), (1, 400), (1, 100), (2, 400)]),
        (["--sort-by", "loss", "--smaller-is-better"], [(1, 100)]),
        (["--sort-by", "loss", "--greater-is-better"], [(1, 400)]),
    ],
)
def test_the_top_n_by_a_metric(
    hpc_det: Command, life: Life, tmp_path: Path, arguments: list[str], which: list[tuple[int, int]]
) -> None:
    out = hpc_det("e", "download", "1", "-o", tmp_path / "out", *arguments).out
    assert out.splitlines() == [f"{tmp_path}/out/{at(life, *one).uuid}" for one in which]


def test_a_metric_is_asked_for_in_a_way_that_says_what_is_best(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    download = ("e", "download", "1", "-o", tmp_path / "out", "--sort-by")
    assert hpc_det(*download, "loss").fails(2, "--sort-by loss", "--smaller-is-better", "--greater-is-better")
    assert hpc_det(*download, "f1", "--greater-is-better").fails(2, "'f1'", "accuracy, loss")
    both = hpc_det("e", "download", "1", "--best", "--top-n", "2")
    assert (both.code, unnamed(both.err, "--best", "--top-n")) == (2, [])


def test_a_checkpoint_of_a_trial_is_the_latest_the_best_or_the_one_that_is_named(
    hpc_det: Command, life: Life, tmp_path: Path
) -> None:
    def got(*arguments: str) -> str:
        return Path(hpc_det("t", "download", "1/1", "-o", tmp_path / "-".join(arguments), *arguments).out.strip()).name

    best, latest = at(life, 1, 100).uuid, at(life, 1, 400).uuid
    assert [got(), got("--latest"), got("--best"), got("--uuid", best[:6])] == [latest, latest, best, best]
    other = hpc_det("t", "download", "1/1", "--uuid", at(life, 2, 100).uuid)
    assert not unnamed(other.err, "trial 1/1", f"{latest}, {best}")
    assert hpc_det("t", "download", "1/1", "--best", "--latest").code == 2


def test_a_trial_without_checkpoints_says_so(hpc_det: Command, root: Path) -> None:
    Life.submitted(root).begins()
    assert hpc_det("t", "download", "1/1").fails(2, "trial 1/1", "no checkpoint")


def test_a_damaged_one_is_refused_and_leaves_nothing(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    broken, whole = at(life, 1, 400), at(life, 2, 400)
    (broken.path / "state_dict.pth").write_bytes(b"weig")
    code, out, err = hpc_det("c", "download", f"{broken.uuid},{whole.uuid}", "-o", tmp_path / "out")
    assert (code, out) == (1, f"{tmp_path}/out/{whole.uuid}\n")
    assert not unnamed(err, f"checkpoint {broken.uuid}", "state_dict.pth", "4 bytes", 7)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [whole.uuid]


def test_nothing_is_overwritten(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    uuid = at(life, 1, 400).uuid
    target = tmp_path / "out" / uuid
    target.mkdir(parents=True)
    assert hpc_det("c", "download", uuid, "-o", tmp_path / "out").fails(2, target, "--output-dir")
    assert list(target.iterdir()) == []


def test_a_store_gives_what_is_lost_or_damaged_here(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    here = copied(at(life, 1, 400).path)
    uuid, damaged = at(life, 1, 400).uuid, at(life, 2, 400)
    moved_to_a_bucket(life, tmp_path / "bucket", but=damaged)
    (damaged.path / "state_dict.pth").write_bytes(b"WEIGHTS")
    assert hpc_det("c", "download", f"{uuid},{damaged.uuid}", "-o", tmp_path / "out").code == 0
    assert copied(tmp_path / "out" / uuid) == here
    assert copied(tmp_path / "out" / damaged.uuid)["state_dict.pth"] == b"weights"
    described = json.loads(hpc_det("c", "describe", uuid, "--json").out)
    assert described["places"] == [f"file://{tmp_path}/bucket/1/{uuid}"]
    assert not unnamed(hpc_det("c", "describe", uuid, "--verify").err, "verifies")


def test_the_code_is_copied_as_it_was_submitted(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    code = life.folder.code_kept
    (code / "net").mkdir(parents=True)
    (code / "net" / "model_def.py").write_text("x = 1")
    target = tmp_path / "code"
    assert hpc_det("e", "download-model-def", "1", "-o", target) == (0, f"{target}\n", "")
    assert (target / "net" / "model_def.py").read_text() == "x = 1"
    assert hpc_det("e", "download-model-def", "1", "-o", target).code == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_sweep_has_no_copy_of_its_code(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    life.folder.code.symlink_to(tmp_path, target_is_directory=True)
    code, _, err = hpc_det("e", "download-model-def", "1")
    assert (code, unnamed(err, tmp_path.resolve())) == (2, [])


def moved_to_a_bucket(life: Life, bucket: Path, but: Committed | None = None) -> None:
    """Move all checkpoints of the experiment to a bucket; `but` also stays here."""
    write_json(life.folder.storage, {"url": f"file://{bucket}"})
    for trial in life.folder.trials():
        remote = Remote(f"file://{bucket}/{trial.id}", {"auto_mkdir": True})
        for checkpoint in committed(trial.checkpoints):
            remote.upload(checkpoint)
            if checkpoint != but:
                delete(checkpoint.path, hidden=".gone")


# --- rm


def test_removed_checkpoints_are_gone(hpc_det: Command, life: Life) -> None:
    first, second = at(life, 1, 100), at(life, 2, 100)
    done = hpc_det("c", "rm", f"{first.uuid[:8]},{second.uuid}", "--yes")
    assert (done.code, unnamed(done.out, first.uuid, second.uuid)) == (0, [])
    assert [len(committed(life.folder.trial(trial).checkpoints)) for trial in (1, 2)] == [1, 1]
    assert hpc_det("c", "delete", first.uuid, "--yes").code == 2


def test_the_command_has_one_name_and_answers_to_another(hpc_det: Command) -> None:
    *_, commands = hpc_det("checkpoint", "--help").out.partition("Commands:\n")
    assert [line.split()[0] for line in commands.splitlines()] == ["describe", "download", "rm"]
    for name in ("rm", "delete"):
        assert "Remove checkpoints of finished experiments" in hpc_det("checkpoint", name, "--help").out


def test_a_store_forgets_them_too(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    checkpoint = at(life, 1, 100)
    moved_to_a_bucket(life, tmp_path / "bucket", but=checkpoint)
    assert hpc_det("c", "rm", checkpoint.uuid, "--yes").code == 0
    assert not list((tmp_path / "bucket").glob(f"1/{checkpoint.uuid}"))
    assert not checkpoint.path.exists()


def test_checkpoints_of_somebody_else_stay_here_and_in_their_store(
    hpc_det: Command, life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting HPC_DET_ROOT to the owner's folder gives another user no permissions."""
    checkpoint = at(life, 1, 100)
    moved_to_a_bucket(life, tmp_path / "bucket", but=checkpoint)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    done = hpc_det("c", "rm", checkpoint.uuid, "--yes")
    assert done.code == 2
    assert not unnamed(done.err, f"hpc-det experiment fork {tmp_path}/states:1")
    assert checkpoint.path.exists()
    assert list((tmp_path / "bucket").glob(f"1/{checkpoint.uuid}"))


def test_nobody_is_there_to_say_yes(hpc_det: Command, life: Life) -> None:
    checkpoint = at(life, 1, 100)
    assert hpc_det("c", "rm", checkpoint.uuid).fails(2, "Remove 1 checkpoint", "7 B", "--yes")
    assert checkpoint.path.exists()


def test_a_running_experiment_keeps_its_checkpoints(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root)
    life.begins()
    checkpoint = life.saves(100)
    assert hpc_det("c", "rm", checkpoint.uuid, "--yes").fails(2, "experiment 1", "RUNNING", "hpc-det experiment kill 1")
    assert checkpoint.damage() == []


def test_a_glob_removes_files_and_the_rest_stays_valid(hpc_det: Command, life: Life) -> None:
    checkpoint = with_another_file(at(life, 1, 400))
    done = hpc_det("c", "rm", checkpoint.uuid, "--glob", "rank-*", "--yes")
    assert unnamed(done.out, f"{checkpoint.uuid}/rank-0.pth", "1 file") == []
    left = at(life, 1, 400)
    assert (set(left.files), left.removed, left.damage()) == ({"state_dict.pth"}, ("rank-0.pth",), [])
    assert not (left.path / "rank-0.pth").exists()
    record = json.loads(hpc_det("c", "describe", checkpoint.uuid, "--verify", "--json").out)
    assert (record["state"], record["removed"]) == ("PARTIALLY_DELETED", ["rank-0.pth"])


def test_nobody_goes_on_from_what_is_left(hpc_det: Command, life: Life) -> None:
    checkpoint = with_another_file(at(life, 1, 400))
    hpc_det("c", "rm", checkpoint.uuid, "--glob", "rank-*", "--yes")
    found, skipped = newest_good(life.trial.checkpoints)
    assert found is not None
    assert found.steps == 100
    facts = [f"checkpoint {checkpoint.uuid}", "400 batches", "hpc-det checkpoint rm --glob", "rank-0.pth"]
    each_names(skipped, facts)


def test_files_go_from_a_store_too(hpc_det: Command, life: Life, tmp_path: Path) -> None:
    checkpoint = with_another_file(at(life, 1, 400))
    moved_to_a_bucket(life, tmp_path / "bucket")
    assert hpc_det("c", "rm", checkpoint.uuid, "--glob", "rank-*", "--yes").code == 0
    there = {path.name for path in (tmp_path / "bucket" / "1" / checkpoint.uuid).iterdir()}
    assert there == {"manifest.json", "state_dict.pth"}
    assert hpc_det("c", "download", checkpoint.uuid, "-o", tmp_path / "out").code == 0


def test_a_glob_that_matches_nothing_names_what_there_is(hpc_det: Command, life: Life) -> None:
    checkpoint = at(life, 1, 400)
    assert hpc_det("c", "rm", checkpoint.uuid, "--glob", "*.txt", "--yes").fails(
        2, "--glob *.txt", f"checkpoint {checkpoint.uuid}", "state_dict.pth"
    )


def with_another_file(checkpoint: Committed) -> Committed:
    (checkpoint.path / "rank-0.pth").write_bytes(b"generators")
    files = {**checkpoint.files, "rank-0.pth": module.checksum(checkpoint.path / "rank-0.pth")}
    more = Committed(path=checkpoint.path, steps=checkpoint.steps, time=checkpoint.time, files=files)
    (checkpoint.path / module.MANIFEST).write_text(module.FORMAT.text(more.manifest))
    return more
