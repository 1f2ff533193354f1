from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from hpc_det.checkpoint import staging
from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import Committed, checksum, committed
from hpc_det.core import portable as portable_module
from hpc_det.core.portable import Portable, keep_code
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrial
from hpc_det.pytorch.loop.run import portable_of
from tests.facts import refused
from tests.pytorch.trials import Life, StopAt

SPEC: dict[str, Any] = {
    "experiment_id": 12,
    "trial_id": 3,
    "trial_seed": 777,
    "hparams": {"lr": 0.1, "layers": [1, 2]},
    "config": {
        "data": {"url": "s3://x", "secrets": {"access_key": "canary"}},
        "environment": {"environment_variables": ["WANDB_API_KEY=canary", "DEPTH=2"]},
    },
}


class Outer:
    class Trial(PyTorchTrial):
        pass


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a code snapshot as a submission writes it."""
    code = tmp_path / "experiment" / "code"
    (code / "models").mkdir(parents=True)
    (code / "model_def.py").write_text("import models.net")
    (code / "models" / "net.py").write_text("layers = 3")
    return code


def saved(folder: Path, portable: Portable, steps: int = 40) -> Committed:
    folder.mkdir(parents=True, exist_ok=True)
    uuid = CheckpointContext(folder, Distributed()).save(steps, {"a.pth": 1}, lambda at: portable.write(at, steps))
    return next(checkpoint for checkpoint in committed(folder) if checkpoint.uuid == uuid)


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


# --- what it says


def test_it_says_what_the_trial_was_built_with(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "checkpoints", portable_of(SPEC, Outer.Trial, None, is_trainer=False))
    assert checkpoint.damage() == []
    assert set(checkpoint.files) == {"a.pth", "load_data.json", "metadata.json"}
    assert json.loads((checkpoint.path / "load_data.json").read_text()) == {
        "trial_type": "PyTorchTrial",
        "trial_cls_spec": "tests.core.test_portable:Outer.Trial",
        "is_trainer": False,
        "experiment_config": {
            "data": {"url": "s3://x", "secrets": {"access_key": "********"}},
            "environment": {"environment_variables": ["WANDB_API_KEY=********", "DEPTH=2"]},
        },
        "hparams": {"lr": 0.1, "layers": [1, 2]},
        "trial_seed": 777,
        "experiment_id": 12,
        "trial_id": 3,
    }
    assert json.loads((checkpoint.path / "metadata.json").read_text()) == {
        "hpc_det_version": importlib.metadata.version("hpc_det"),
        "framework": f"torch-{torch.__version__}",
        "format": "pickle",
        "steps_completed": 40,
    }


@pytest.mark.parametrize(
    "config",
    [{}, {"data": None, "environment": None}, {"environment": {"image": "x"}}, {"searcher": {"metric": "loss"}}],
)
def test_a_script_may_give_any_part_of_a_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    portable_of({**SPEC, "config": config}, Outer.Trial, None, is_trainer=True).write(tmp_path, 1)
    about = json.loads((tmp_path / "load_data.json").read_text())
    assert about["is_trainer"] is True
    assert about["experiment_config"].get("searcher") == config.get("searcher")


def test_what_json_cannot_hold_is_refused_before_training() -> None:
    with refused(UsageError, "JSON", "PosixPath"):
        portable_of({**SPEC, "hparams": {"data": Path("/data")}}, Outer.Trial, None, is_trainer=True)


def test_a_callback_may_add_to_the_metadata(tmp_path: Path) -> None:
    portable = portable_of(SPEC, Outer.Trial, None, is_trainer=False)

    def finish(folder: Path) -> Any:
        known = portable.write(folder, 40)
        metadata = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps({**metadata, "note": "mine"}))
        return known

    (tmp_path / "checkpoints").mkdir()
    CheckpointContext(tmp_path / "checkpoints", Distributed()).save(40, {}, finish)
    (checkpoint,) = committed(tmp_path / "checkpoints")
    assert checkpoint.damage() == []
    assert json.loads((checkpoint.path / "metadata.json").read_text())["note"] == "mine"


# --- the code


def test_checkpoints_take_the_code_along(tmp_path: Path, code: Path) -> None:
    checkpoint = saved(tmp_path / "checkpoints", portable_of(SPEC, Outer.Trial, code, is_trainer=False))
    assert files(checkpoint.path / "code") == files(code)
    assert {"code/model_def.py", "code/models/net.py"} <= set(checkpoint.files)
    assert checkpoint.damage() == []


def test_checkpoints_share_their_code_files(tmp_path: Path, code: Path) -> None:
    portable = portable_of(SPEC, Outer.Trial, code, is_trainer=False)
    first, second = (saved(tmp_path / "checkpoints", portable, steps) for steps in (10, 20))
    net = [checkpoint.path / "code" / "models" / "net.py" for checkpoint in (first, second)]
    assert net[0].samefile(net[1])
    assert not net[0].samefile(code / "models" / "net.py")
    shutil.rmtree(first.path)
    assert second.damage() == []


def test_the_code_is_read_and_flushed_once(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(path: Path) -> Any:
        read.append(path.name)
        return checksum(path)

    monkeypatch.setattr(portable_module, "checksum", noted)
    monkeypatch.setattr(staging, "checksum", noted)
    portable = portable_of(SPEC, Outer.Trial, code, is_trainer=False)
    for steps in (10, 20):
        saved(tmp_path / "checkpoints", portable, steps)
    assert sorted(read) == sorted(["model_def.py", "net.py", *["load_data.json", "metadata.json"] * 2])


def test_where_there_are_no_hard_links_files_are_copied(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "link", no_links)
    portable = portable_of(SPEC, Outer.Trial, code, is_trainer=False)
    first, second = (saved(tmp_path / "checkpoints", portable, steps) for steps in (10, 20))
    assert files(first.path / "code") == files(second.path / "code") == files(code)
    assert not (first.path / "code" / "model_def.py").samefile(second.path / "code" / "model_def.py")
    assert second.damage() == []


def test_what_the_trial_does_in_its_folder_harms_no_checkpoint(tmp_path: Path, code: Path) -> None:
    """The folder of the code is the working directory of the trial."""
    before = files(code)
    keep_code(code)
    with (code / "model_def.py").open("a") as file:
        file.write("\n# a trial that writes into a file that was submitted")
    (code / "data").mkdir()
    (code / "data" / "downloaded.bin").write_text("much")
    first = saved(tmp_path / "checkpoints", portable_of(SPEC, Outer.Trial, code, is_trainer=False))
    (code / "model_def.py").write_text("again")
    later = saved(tmp_path / "checkpoints", portable_of(SPEC, Outer.Trial, code, is_trainer=False), 50)
    for checkpoint in (first, later):
        assert files(checkpoint.path / "code") == before
        assert checkpoint.damage() == []


def test_only_what_a_submission_copies_is_kept(code: Path) -> None:
    before = files(code)
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "model_def.pyc").write_text("bytecode")
    (code / "to_data").symlink_to("/proc")
    (code / "to_nothing").symlink_to("missing")
    os.mkfifo(code / "pipe")
    assert files(keep_code(code)) == before


def test_kept_code_cannot_be_edited_by_mistake(code: Path) -> None:
    kept = keep_code(code)
    assert {path.stat().st_mode & 0o222 for path in kept.rglob("*") if path.is_file()} == {0}
    shutil.rmtree(kept)
    assert not kept.exists()


def test_a_copy_that_was_cut_short_is_none(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(portable_module, "flush_tree", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            keep_code(code)
    assert [path.name for path in code.parent.iterdir()] == ["code"]
    assert files(keep_code(code)) == files(code)


def test_of_two_trials_that_keep_the_code_the_first_one_stands(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(_: Path) -> None:
        monkeypatch.undo()
        keep_code(code)
        (code / "model_def.py").write_text("changed since")

    before = files(code)
    monkeypatch.setattr(portable_module, "flush_tree", overtaken)
    kept = keep_code(code)
    assert files(kept) == before
    assert {path.name for path in code.parent.iterdir()} == {"code", kept.name}


# --- in a trial's life


def test_every_checkpoint_of_a_trial_has_it(tmp_path: Path) -> None:
    life = Life.begin(tmp_path / "trial")
    life.attempt(StopAt(4))
    (checkpoint,) = committed(life.folder.checkpoints)
    about = json.loads((checkpoint.path / "load_data.json").read_text())
    assert about["trial_cls_spec"] == "tests.pytorch.trials:Tiny"
    assert about["hparams"] == life.hparams
    assert json.loads((checkpoint.path / "metadata.json").read_text())["steps_completed"] == checkpoint.steps


# --- several trials at once


def test_trials_that_begin_at_the_same_time_share_one_copy_of_the_code(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "package").mkdir(parents=True)
    for number in range(20):
        (code / "package" / f"module_{number}.py").write_text(f"{number}")
    together = Barrier(8)

    def begin() -> Path:
        together.wait()
        return keep_code(code)

    with ThreadPoolExecutor(8) as trials:
        (kept,) = {future.result() for future in [trials.submit(begin) for _ in range(8)]}
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, "code"]
    assert len(list((kept / "package").iterdir())) == 20


def test_a_trial_that_began_first_may_change_the_code_under_one_that_still_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials download and delete files in `code` while they train."""
    code = tmp_path / "code"
    code.mkdir()
    for name in ("model_def.py", "downloading.part"):
        (code / name).write_text(name)
    copytree, here = shutil.copytree, iter([True])

    def overtaken(*args: Any, **options: Any) -> Any:
        if next(here, False):
            keep_code(code)
            (code / "downloading.part").unlink()
            raise shutil.Error([("downloading.part", "", "No such file")])
        return copytree(*args, **options)

    monkeypatch.setattr(shutil, "copytree", overtaken)
    kept = keep_code(code)
    assert sorted(path.name for path in kept.iterdir()) == ["downloading.part", "model_def.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, "code"]


def test_a_copy_that_fails_without_another_one_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    (tmp_path / "code").mkdir()
    monkeypatch.setattr(shutil, "copytree", full)
    with refused(OSError) as error:
        keep_code(tmp_path / "code")
    assert error.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["code"]
