"""Write a checkpoint with the files that the training loop writes."""

from __future__ import annotations

from pathlib import Path

from hpc_det.checkpoint.committed import Committed
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.checkpoint.staging import new_staging
from hpc_det.store.save_times import Save


def saved(checkpoints: Path, steps: int) -> Committed:
    staging = new_staging(checkpoints)
    entries: dict[str, FileEntry] = {}
    (staging.partial / "code").mkdir()
    (staging.partial / "code" / "model_def.py").write_text("pass")
    with staging.file("state.pt", entries) as file:
        file.write(b"weights" * steps)
    staging.add_others(entries)
    return staging.commit(steps, entries)


def save(
    committed_s: float = 1.0,
    stall_s: float = 1.0,
    *,
    batch_s: float | None = None,
    batches: int = 10,
    began: float = 1e9,
    size_bytes: int = 1,
) -> Save:
    """Return a line of saves.jsonl."""
    return Save(
        batches=batches,
        began=began,
        committed_s=committed_s,
        stall_s=stall_s,
        size_bytes=size_bytes,
        batch_s=batch_s,
    )
