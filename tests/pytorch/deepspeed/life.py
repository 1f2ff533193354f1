"""Run the attempts of a DeepSpeedTrial on real ranks, and read their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.content import load
from hpc_det.config.merge import merge
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.deepspeed.checkpoint_engine import ShardFiles
from hpc_det.pytorch.trial.trial import Trial
from hpc_det.store.folders import TrialFolder
from tests.pytorch.trials import CONFIG, Life


def life_of(distributed: Distributed, path: Path, trial_class: type[Trial], hparams: Any = None, **config: Any) -> Life:
    """Return the trial's attempts in `path`. Collective: all ranks use the same folder."""
    folder = TrialFolder(path)
    if distributed.is_chief:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    return Life(folder, trial_class, merge(CONFIG, config), {"workers": 0, **(hparams or {})})


def newest(life: Life) -> dict[str, Any]:
    """Return the state of training in the newest checkpoint, by file."""
    checkpoint = committed(life.folder.checkpoints)[0]
    assert not checkpoint.damage()
    shards = ShardFiles()
    readers = {".pth": load, ".pt": lambda path: shards.load(str(path))}
    return {
        name: _plain(readers[Path(name).suffix](checkpoint.path / name))
        for name in checkpoint.files
        if Path(name).suffix in readers
    }


def _plain(value: Any) -> Any:
    """Replace DeepSpeed's objects, which have no comparison, by their attributes."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return vars(value) if type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__") else value
