from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import newest_good
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rng import restore_rng, rng_state
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch import LRScheduler, PyTorchTrial
from hpc_det.pytorch.loop.run import portable_of
from hpc_det.pytorch.state.load import CheckpointLoadContext, load_trial_from_checkpoint_path
from hpc_det.pytorch.state.state import stored_state
from tests.facts import refused
from tests.pytorch.trials import Life, StopAt, Tiny, differences

MODEL_DEF = """
import layers
from hpc_det.pytorch import LRScheduler, PyTorchTrial
from torch import nn, optim


class Outer:
    class Trial(PyTorchTrial):
        def __init__(self, context, extra=None):
            from late import WORD
            self.context = context
            self.extra = extra
            self.word = WORD
            self.model = context.wrap_model(layers.net(context.get_hparam("width")))
            self.optimizer = context.wrap_optimizer(optim.Adam(self.model.parameters(), lr=0.1))
            context.wrap_lr_scheduler(
                optim.lr_scheduler.StepLR(self.optimizer, 1), LRScheduler.StepMode.STEP_EVERY_EPOCH
            )


class NoTrial:
    pass
"""
LAYERS = (
    "from torch import nn\n\ndef net(width):\n    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))\n"
)


class Trial(PyTorchTrial):
    """The trial of `model_def` without imports of other modules."""

    def __init__(self, context: CheckpointLoadContext, extra: str | None = None) -> None:
        self.context = context
        self.extra = extra
        self.model = context.wrap_model(net(context.get_hparam("width")))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.1))
        context.wrap_lr_scheduler(lr_scheduler.StepLR(self.optimizer, 1), LRScheduler.StepMode.STEP_EVERY_EPOCH)


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


@pytest.fixture(autouse=True)
def same_imports() -> Iterator[None]:
    """Check that every load leaves Python's imports unchanged."""
    path, modules, bytecode = [*sys.path], {*sys.modules}, sys.dont_write_bytecode
    yield
    assert sys.path == path
    left = {*sys.modules} - modules
    assert not left & {"model_def", "layers", "late", "models", "models.net", "profile"}
    assert sys.dont_write_bytecode is bytecode


def state_of(trial: Any) -> dict[str, Any]:
    return {
        "models_state_dict": [model.state_dict() for model in trial.context.models],
        "optimizers_state_dict": [optimizer.state_dict() for optimizer in trial.context.optimizers],
        "lr_schedulers_state_dict": [scheduler.state_dict() for scheduler in trial.context.lr_schedulers],
        "callbacks": {},
    }


def trained(width: int = 3) -> dict[str, Any]:
    """Return the state of a trial after a few steps."""
    trial = Trial(CheckpointLoadContext({"width": width}))
    for _ in range(3):
        trial.model(torch.randn(4, 2, device=trial.context.device)).square().sum().backward()
        trial.optimizer.step()
    trial.context.lr_schedulers[0].step()
    return state_of(trial)


def code_folder(path: Path, word: str, **more: str) -> Path:
    path.mkdir(parents=True)
    sources = {"model_def": MODEL_DEF, "layers": LAYERS, "late": f"WORD = {word!r}\n", **more}
    for name, source in sources.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / f"{name}.py").write_text(source)
    return path


def saved(
    path: Path, state: dict[str, Any], *, word: str = "", is_trainer: bool = False, cls: str = "", **more: str
) -> Path:
    """Save a checkpoint of hpc_det with its code and return its path."""
    named = type("_Named", (PyTorchTrial,), {})
    named.__module__, _, named.__qualname__ = (cls or "model_def:Outer.Trial").partition(":")
    spec = {
        "experiment_id": 4,
        "trial_id": 2,
        "trial_seed": 9,
        "hparams": {"width": 3},
        "config": {"data": {"at": "x"}},
    }
    portable = portable_of(spec, named, code_folder(path / "code", word, **more), is_trainer=is_trainer)
    (path / "checkpoints").mkdir()
    files = {"state_dict.pth": state}
    uuid = CheckpointContext(path / "checkpoints", Distributed()).save(
        7, files, lambda folder: portable.write(folder, 7)
    )
    return path / "checkpoints" / uuid


# --- our own


def test_a_trial_comes_back_with_all_that_it_wrapped(tmp_path: Path) -> None:
    state = trained()
    folder = saved(tmp_path, state, word="one")
    before = sorted(folder.rglob("*"))
    trial: Any = load_trial_from_checkpoint_path(str(folder), trial_kwargs={"extra": "mine"})
    assert differences(state_of(trial), state) == []
    assert type(trial).__name__ == "Trial"
    assert (trial.word, trial.extra) == ("one", "mine")
    context = trial.context
    assert isinstance(context, CheckpointLoadContext)
    assert (context.get_trial_seed(), context.get_experiment_id(), context.get_trial_id()) == (9, 4, 2)
    assert context.get_hparams() == {"width": 3}
    assert context.get_data_config() == {"at": "x"}
    assert context.distributed.get_size() == 1
    assert next(trial.model.parameters()).device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert sorted(folder.rglob("*")) == before, "the checkpoint is as it was"


def test_a_trial_of_the_loop_comes_back(tmp_path: Path) -> None:
    life = Life.begin(tmp_path / "trial")
    life.attempt(StopAt(10))
    checkpoint, _ = newest_good(life.folder.checkpoints)
    assert checkpoint is not None
    trial: Any = load_trial_from_checkpoint_path(checkpoint.path)
    assert type(trial) is Tiny
    stored = life.newest["state_dict.pth"]
    loaded = state_of(trial)
    assert differences({**loaded, "callbacks": None}, {**stored, "callbacks": None}) == []


def test_two_checkpoints_of_one_process_do_not_mix(tmp_path: Path) -> None:
    first, second = (saved(tmp_path / word, trained(), word=word) for word in ("one", "two"))
    words = [load_trial_from_checkpoint_path(folder).word for folder in (first, second, first)]  # type: ignore[attr-defined]
    assert words == ["one", "two", "one"]


def test_packages_without_init_do_not_mix(tmp_path: Path) -> None:
    folders = []
    for word in ("one", "two"):
        source = MODEL_DEF.replace("import layers", "import models.net as layers")
        net: Any = {"models/net": f"{LAYERS}\nNAME = {word!r}\n"}
        folders.append(saved(tmp_path / word, trained(), word=word, model_def=source, **net))
    trials: list[Any] = [load_trial_from_checkpoint_path(folder) for folder in folders]
    names = [sys.modules.get("models.net"), *(type(t).__init__.__globals__["layers"].NAME for t in trials)]
    assert names == [None, "one", "two"]


def test_what_was_imported_before_is_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = code_folder(tmp_path / "own", "own")
    with monkeypatch.context() as here:
        here.syspath_prepend(str(own))
        late = importlib.import_module("late")
        trial: Any = load_trial_from_checkpoint_path(saved(tmp_path, trained(), word="stored"))
        assert trial.word == "stored"
        assert sys.modules.pop("late") is late
        assert late.WORD == "own"


def test_folders_of_data_hide_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers packages that are imported already, and packages that could be imported; the latter stay imported."""
    (tmp_path / "site" / "installed").mkdir(parents=True)
    (tmp_path / "site" / "installed" / "__init__.py").write_text("WORD = 'installed'")
    folder = saved(tmp_path, trained(), late="import torch, installed\nWORD = torch.__name__ + installed.WORD\n")
    for name in ("torch", "hpc_det", "installed"):
        (folder / "code" / name).mkdir()
    with monkeypatch.context() as here:
        here.syspath_prepend(str(tmp_path / "site"))
        trial: Any = load_trial_from_checkpoint_path(folder)
    assert trial.word == "torchinstalled"
    assert sys.modules["torch"] is torch
    assert sys.modules.pop("installed").WORD == "installed"


def test_a_module_named_as_one_of_python_does_not_stay(tmp_path: Path) -> None:
    """A module of the standard library has precedence only if it is imported already; this one is not."""
    before = sys.modules.pop("sndhdr", None)
    assert before is None
    folder = saved(tmp_path, trained(), late="import sndhdr\nWORD = sndhdr.WORD\n", sndhdr="WORD = 'ours'\n")
    trial: Any = load_trial_from_checkpoint_path(folder)
    assert trial.word == "ours"
    assert "sndhdr" not in sys.modules


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path, trained(), layers="1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_trial_from_checkpoint_path(folder)


def test_a_class_that_is_given_needs_no_code(tmp_path: Path) -> None:
    state = trained()
    folder = saved(tmp_path, state, is_trainer=True)
    trial = load_trial_from_checkpoint_path(folder, Trial, {"extra": "x"})
    assert type(trial) is Trial
    assert differences(state_of(trial), state) == []


@pytest.mark.parametrize(
    ("options", "legacy"),
    [({"map_location": "cpu"}, {}), ({}, {"map_location": "cpu"}), ({"mmap": True}, {}), ({"weights_only": True}, {})],
)
def test_torch_may_be_told_how_to_load(tmp_path: Path, options: dict[str, Any], legacy: dict[str, Any]) -> None:
    state = trained()
    trial = load_trial_from_checkpoint_path(saved(tmp_path, state), torch_load_kwargs=options, **legacy)
    assert differences(state_of(trial), state) == []


# --- Determined's


def determined(path: Path, place: str, state: dict[str, Any], about: dict[str, Any] | None = None) -> Path:
    """Write a folder as Determined does: no manifest, and generators in the state."""
    generators = {
        "cpu_rng_state": torch.get_rng_state(),
        "np_rng_state": np.random.get_state(),
        "random_rng_state": random.getstate(),
    }
    code_folder(path / "code", "theirs")
    (path / place).parent.mkdir(exist_ok=True)
    torch.save({**state, "callbacks": {"mine": {"best": np.float64(0.5)}}, "rng_state": generators}, path / place)
    known = {"trial_type": "PyTorchTrial", "experiment_config": {"searcher": {}}, "hparams": {"width": 3}}
    about = {**known, "trial_cls_spec": "model_def:Outer.Trial"} if about is None else about
    (path / "load_data.json").write_text(json.dumps(about))
    return path


def with_prefix(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the key prefix of DDP's state_dict and the versions of modules."""
    model = state["models_state_dict"][0]
    prefixed = OrderedDict((f"module.{name}", value) for name, value in model.items())
    prefixed._metadata = {"": {}, **{f"module.{name}".rstrip("."): v for name, v in model._metadata.items()}}  # type: ignore[attr-defined]
    return {**state, "models_state_dict": [prefixed]}


@pytest.mark.parametrize(
    "place", ["state_dict.pth", "determined/state_dict.pth", "pedl/state_dict.pth", "checkpoint.pt"]
)
@pytest.mark.parametrize("prefixed", [False, True])
def test_a_checkpoint_of_determined_loads(tmp_path: Path, place: str, prefixed: bool) -> None:
    state = trained()
    folder = determined(tmp_path / "theirs", place, with_prefix(state) if prefixed else state)
    trial: Any = load_trial_from_checkpoint_path(folder)
    assert trial.word == "theirs"
    assert differences(state_of(trial), state) == []


def test_what_determined_wrote_at_a_download_before_0_17_7_is_understood(tmp_path: Path) -> None:
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained())
    about = {"framework": "torch-1.4", "hparams": {"width": 3}}
    config = {"entrypoint": "model_def:Outer.Trial"}
    (folder / "metadata.json").write_text(json.dumps({**about, "experiment_config": config}))
    (folder / "load_data.json").unlink()
    trial: Any = load_trial_from_checkpoint_path(folder)
    assert trial.word == "theirs"
    assert trial.context.get_experiment_config() == config


@pytest.mark.integration
def test_a_model_def_that_imports_determined_is_told_what_to_do_and_then_runs(tmp_path: Path) -> None:
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained())
    source = (folder / "code" / "model_def.py").read_text()
    (folder / "code" / "model_def.py").write_text(source.replace("hpc_det.pytorch", "determined.pytorch"))
    with refused(UsageError, "No module named 'determined'", "hpc_det.compat.install()"):
        load_trial_from_checkpoint_path(folder)
    script = (
        "import sys, hpc_det.compat as compat; compat.install(); from hpc_det.pytorch import *; "
        "print(load_trial_from_checkpoint_path(sys.argv[1]).word)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    assert done.stdout.strip() == "theirs", done.stderr


class Wrapping(nn.Module):
    """Has a child with the name that DDP uses."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_model_may_call_its_own_child_module(tmp_path: Path, prefix: str) -> None:
    model = Wrapping()
    stored = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"models_state_dict": [stored]}, tmp_path / "state_dict.pth")
    assert stored_state(tmp_path, [Wrapping()])["models_state_dict"][0].keys() == model.state_dict().keys()


def test_all_four_keys_are_always_there(tmp_path: Path) -> None:
    torch.save({"models_state_dict": [{}, {}], "other": 1}, tmp_path / "state_dict.pth")
    assert stored_state(tmp_path, [nn.ReLU()]) == {
        "models_state_dict": [{}, {}],
        "optimizers_state_dict": [],
        "lr_schedulers_state_dict": [],
        "callbacks": {},
        "other": 1,
    }


# --- what cannot be loaded


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with refused(UsageError, tmp_path / "missing", "folder"):
        load_trial_from_checkpoint_path(tmp_path / "missing")
    with refused(UsageError, tmp_path, "state_dict.pth", "checkpoint.pt"):
        load_trial_from_checkpoint_path(tmp_path, Trial)
    torch.save(trained(), tmp_path / "state_dict.pth")
    with refused(UsageError, tmp_path / "load_data.json", "class"):
        load_trial_from_checkpoint_path(tmp_path)


@pytest.mark.parametrize("damaged", ["state_dict.pth", "code/layers.py", "load_data.json"])
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str) -> None:
    folder = saved(tmp_path, trained())
    content = bytearray((folder / damaged).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / damaged).unlink()
    (folder / damaged).write_bytes(content)
    with refused(HpcDetError, f"{damaged}: ", "crc32", "manifest"):
        load_trial_from_checkpoint_path(folder)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, trained())
    (folder / "manifest.json").write_text("{}")
    with refused(HpcDetError, "manifest.json"):
        load_trial_from_checkpoint_path(folder)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, None], ids=["empty", "zeros", "torn"])
def test_a_damaged_file_of_determined_is_named(tmp_path: Path, content: bytes | None) -> None:
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained())
    state = folder / "state_dict.pth"
    state.write_bytes(state.read_bytes()[:-500] if content is None else content)
    with refused(HpcDetError, state):
        load_trial_from_checkpoint_path(folder)


@pytest.mark.parametrize("text", ["{", ""])
def test_a_torn_load_data_is_named(tmp_path: Path, text: str) -> None:
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained())
    (folder / "load_data.json").write_text(text)
    with refused(HpcDetError, "load_data.json", "JSON"):
        load_trial_from_checkpoint_path(folder)


class Evil:
    """Would create a folder if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_the_state_does_not_run(tmp_path: Path) -> None:
    folder = determined(tmp_path / "theirs", "state_dict.pth", {**trained(), "extra": Evil(tmp_path / "executed")})
    with refused(HpcDetError, folder / "state_dict.pth", "tensors", "posix.mkdir", "weights_only=False"):
        load_trial_from_checkpoint_path(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (Path("/"), "pathlib"),
        (np.array([{}], dtype=object), "dtype object"),
    ],
)
def test_what_is_more_than_numbers_is_named(tmp_path: Path, value: Any, fact: str) -> None:
    torch.save({**trained(), "extra": value}, tmp_path / "state_dict.pth")
    with refused(HpcDetError, tmp_path / "state_dict.pth", fact) as error:
        stored_state(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"weights_only": False}, ["weights_only=False"]),
        ({"pickle_module": random}, ["pickle_module", "map_location", "mmap"]),
        ({"encoding": "ascii"}, ["encoding", "map_location", "mmap"]),
    ],
)
def test_what_would_run_code_cannot_be_asked_for(tmp_path: Path, options: dict[str, Any], facts: list[str]) -> None:
    with refused(UsageError, *facts):
        load_trial_from_checkpoint_path(tmp_path, torch_load_kwargs=options)
    with refused(UsageError, *facts):
        load_trial_from_checkpoint_path(tmp_path, **options)


@pytest.mark.parametrize(
    ("cls", "facts"),
    [
        ("model_def:Missing", ["code/model_def.py", "Missing", "trial_class"]),
        ("model_def:Outer.Missing", ["Outer.Missing"]),
        ("model_def:NoTrial", ["model_def:NoTrial", "hpc_det.pytorch.PyTorchTrial"]),
        ("missing_def:Trial", ["missing_def:Trial", "No module named 'missing_def'"]),
    ],
)
def test_a_class_that_is_not_there_is_named(tmp_path: Path, cls: str, facts: list[str]) -> None:
    with refused(UsageError, *facts):
        load_trial_from_checkpoint_path(saved(tmp_path, trained(), cls=cls))


@pytest.mark.parametrize("mark", ["is_trainer", "trial_in_main"])
@pytest.mark.parametrize("name", ["__main__:Trial", ":Trial"])
def test_a_script_of_unknown_name_needs_the_class(tmp_path: Path, name: str, mark: str) -> None:
    about = {"trial_cls_spec": name, "hparams": {"width": 3}, mark: True}
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained(), about)
    with refused(UsageError, name, "trial_class"):
        load_trial_from_checkpoint_path(folder)


def test_a_class_of_a_trainer_is_imported_from_the_code(tmp_path: Path) -> None:
    state = trained()
    trial: Any = load_trial_from_checkpoint_path(saved(tmp_path, state, word="code", is_trainer=True))
    assert trial.word == "code"
    assert differences(state_of(trial), state) == []


def test_a_class_of_a_trainer_without_code_is_imported_from_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = code_folder(tmp_path / "installed", "installed")
    about = {"trial_cls_spec": "model_def:Outer.Trial", "hparams": {"width": 3}, "is_trainer": True}
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained(), about)
    shutil.rmtree(folder / "code")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(installed))
        trial: Any = load_trial_from_checkpoint_path(folder)
    assert trial.word == "installed"
    for name in ("model_def", "layers", "late"):
        del sys.modules[name]


GUARD = """
if __name__ == "__main__":
    raise AssertionError("trained")
"""


def test_a_script_that_trains_only_as_the_main_program_is_imported(tmp_path: Path) -> None:
    about = {"trial_cls_spec": "train:Outer.Trial", "hparams": {"width": 3}, "is_trainer": True, "trial_in_main": True}
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained(), about)
    (folder / "code" / "train.py").write_text(MODEL_DEF + GUARD)
    trial: Any = load_trial_from_checkpoint_path(folder)
    assert type(trial).__module__ == "train"


def test_a_script_that_trains_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    about = {"trial_cls_spec": "train:Outer.Trial", "hparams": {"width": 3}, "is_trainer": True, "trial_in_main": True}
    folder = determined(tmp_path / "theirs", "state_dict.pth", trained(), about)
    (folder / "code" / "train.py").write_text(MODEL_DEF + "raise AssertionError('trained')\n")
    with refused(UsageError, "train:Outer.Trial", folder / "code" / "train.py", "__main__", "trial_class"):
        load_trial_from_checkpoint_path(folder)


def test_a_class_that_wraps_other_objects_is_told_both_numbers(tmp_path: Path) -> None:
    state = trained()
    state["models_state_dict"] *= 2
    with refused(HpcDetError, "models_state_dict", 2, 1):
        load_trial_from_checkpoint_path(saved(tmp_path, state))


def test_the_state_of_something_else_is_named(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "state_dict.pth")
    with refused(HpcDetError, tmp_path / "state_dict.pth", "models_state_dict", "PyTorchTrial"):
        stored_state(tmp_path)


def test_a_link_to_a_checkpoint_is_as_good(tmp_path: Path) -> None:
    folder = saved(tmp_path, trained(), word="x")
    (tmp_path / "best").symlink_to(folder)
    copy = shutil.copytree(folder, tmp_path / "a copy under another name")
    for path in (tmp_path / "best", copy, folder / "code" / ".."):
        assert load_trial_from_checkpoint_path(path).word == "x"  # type: ignore[attr-defined]
