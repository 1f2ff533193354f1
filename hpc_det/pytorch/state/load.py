"""Load a trained trial from a checkpoint's folder, without a cluster. The checkpoint may be Determined's.

The folder contains the class name and its arguments (load_data.json), the code (code/) and the state (state_dict.pth).
Reading it unpickles only tensors, numbers, texts and plain containers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_det.checkpoint.committed import CODE, LOAD_DATA, MANIFEST, METADATA, read_manifest
from hpc_det.checkpoint.committed_folder import OddManifest, in_words, irregularities
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.json_files import read_json
from hpc_det.pytorch.state.class_name import class_of
from hpc_det.pytorch.state.state import restore_models, state_file, stored_state
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.pytorch.trial.trial import PyTorchTrial


class CheckpointLoadContext(PyTorchTrialContext):
    """The context of a trial that is loaded by hand: one rank, on this machine's first GPU or on its CPU."""

    def __init__(
        self,
        hparams: dict[str, Any] | None = None,
        exp_conf: dict[str, Any] | None = None,
        *,
        trial_seed: int = 0,
        experiment_id: int = 0,
        trial_id: int = 0,
    ) -> None:
        ids = {"trial_seed": trial_seed, "experiment_id": experiment_id, "trial_id": trial_id}
        super().__init__({**ids, "hparams": hparams or {}, "config": exp_conf or {}}, Distributed())


def load_trial_from_checkpoint_path(
    path: str | os.PathLike[str],
    trial_class: type[PyTorchTrial] | None = None,
    trial_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
    **legacy: Any,
) -> PyTorchTrial:
    """Return the trial of a checkpoint, with its models, optimizers and schedulers restored.

    Its class comes from the checkpoint's code, or from what is installed, unless `trial_class` is given. A class that a
    script of the Trainer defines is imported if the script trains under `if __name__ == "__main__"`. The trial is built
    as trial_class(context, **trial_kwargs). During the construction, modules are imported from `code/` alone, and
    are removed afterwards: what a method imports when it is called must be importable then.

    `torch_load_kwargs` may contain `map_location` and `mmap`; `legacy` accepts the same as keyword arguments, as
    Determined did.

    Raises UsageError for a folder that is not a checkpoint or lacks needed files, HpcDetError for a damaged one and if
    the class wraps other objects than were saved; exceptions of the trial are passed on.
    """
    options = _torch_options({**(torch_load_kwargs or {}), **legacy})
    folder = Path(path).resolve()
    _check_folder(folder, imports_code=trial_class is None)
    about = _about(folder)
    with nullcontext() if trial_class else importing_from(folder / CODE):
        trial_class = trial_class or class_of(about, folder)
        context = _context(about)
        trial = trial_class(context, **(trial_kwargs or {}))
        restore_models(stored_state(folder, context.models, **options), context, folder)
    return trial


def _torch_options(given: Mapping[str, Any]) -> dict[str, Any]:
    problems = [
        f"torch_load_kwargs: {name} is not supported; use map_location and mmap"
        for name in given
        if name not in ("map_location", "mmap", "weights_only")
    ]
    if not given.get("weights_only", True):
        problems.append(
            "torch_load_kwargs: weights_only=False would run code from the file; remove it. The state of "
            "a PyTorchTrial is loaded without it, including numpy arrays and numbers"
        )
    if problems:
        raise UsageError(problems)
    return {name: value for name, value in given.items() if name != "weights_only"}


def _check_folder(folder: Path, *, imports_code: bool) -> None:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; name the folder of a checkpoint, checkpoints/UUID of its trial")
    if wrong := in_words(irregularities(folder)):  # before anything is opened
        raise HpcDetError([f"{folder}: not loaded: {problem}" for problem in wrong])
    if _trial_type(folder) == "DeepSpeedTrial":
        raise UsageError(
            f"{folder}: saved by a DeepSpeedTrial, whose weights are in the shards of its engines, model0 and so on; "
            f"read them with deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "
            f"tag='model0'), or with load_checkpoint(folder, tag='model0') of an engine"
        )
    state_file(folder)
    problems = _damage(folder, imports_code)
    if problems:
        raise HpcDetError([f"{folder}: damaged: {problem}; use another checkpoint" for problem in problems])


def _damage(folder: Path, imports_code: bool) -> list[str]:
    try:
        checkpoint = read_manifest(folder)
    except FileNotFoundError:
        return []  # Determined wrote none
    except (OddManifest, OSError) as error:
        return [f"{MANIFEST}: {error}"]
    problems, of_code = checkpoint.damage(), checkpoint.code_damage() if imports_code else []
    return [*problems, *(f"{problem} (with `trial_class` its code is not needed)" for problem in of_code)]


def _trial_type(folder: Path) -> str | None:
    try:
        return (read_json(folder / LOAD_DATA) or {}).get("trial_type")
    except ValueError:  # damaged; reported later, once the folder is known to be a checkpoint
        return None


def _about(folder: Path) -> dict[str, Any]:
    """Return load_data.json, or what Determined up to 0.17.7 wrote into metadata.json at the download, or
    an empty map.
    """
    try:
        about: Any = read_json(folder / LOAD_DATA)
        if about is not None:
            return dict(about)
        about = read_json(folder / METADATA) or {}
    except ValueError as error:
        raise HpcDetError(f"{folder}: damaged: {LOAD_DATA} or {METADATA} is not valid JSON: {error}") from None
    return {**about, "trial_cls_spec": (about.get("experiment_config") or {}).get("entrypoint")}


def _context(about: Mapping[str, Any]) -> CheckpointLoadContext:
    ids = {name: about[name] for name in ("trial_seed", "experiment_id", "trial_id") if name in about}
    return CheckpointLoadContext(about.get("hparams"), about.get("experiment_config"), **ids)


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Import modules of `folder` within the block, and forget them afterwards: two folders may both have a `model_def`.

    Within the block, modules of `folder` take precedence over others of the same name, except the standard library and
    hpc_det. A missing folder has no modules.
    """
    names = _modules_in(folder)
    path, writes_bytecode = [*sys.path], sys.dont_write_bytecode
    others = {name: module for name, module in sys.modules.items() if _root(name) in names}
    for name in others:
        del sys.modules[name]
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # the folder stays as it is
    importlib.invalidate_caches()  # the folder may be newer than Python's cached listing
    try:
        yield
    finally:
        for name, module in [*sys.modules.items()]:
            if name not in before and (_root(name) in names or _lies_in(folder, module)):
                del sys.modules[name]
        sys.modules.update(others)
        sys.path[:] = path
        sys.dont_write_bytecode = writes_bytecode


def _modules_in(folder: Path) -> set[str]:
    stems = {path.name.partition(".")[0] for path in folder.glob("*")}
    return {name for name in stems - sys.stdlib_module_names - {"hpc_det"} if _is_found_in(folder, name)}


def _is_found_in(folder: Path, name: str) -> bool:
    """Return whether Python would import `name` from `folder`.

    It prefers a package elsewhere to a mere folder here, which may contain data and be called `datasets`.
    """
    here = PathFinder.find_spec(name, [str(folder)])
    if here is None or here.origin is not None:
        return here is not None
    anywhere = PathFinder.find_spec(name, [str(folder), *sys.path])
    is_loaded = getattr(sys.modules.get(name), "__file__", None) is not None
    return not is_loaded and anywhere is not None and anywhere.origin is None


def _lies_in(folder: Path, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


def _root(name: str) -> str:
    return name.partition(".")[0]
