"""Convert an engine's shards into DeepSpeed's universal checkpoint, in a separate process.

  python -m hpc_det.pytorch.deepspeed.convert SHARDS UNIVERSAL

DeepSpeed's converter unpickles the files that it reads. The caller sets TORCH_FORCE_WEIGHTS_ONLY_LOAD, so that torch
unpickles only plain content and the classes that checkpoint_engine.py allows. The converter's workers are forked, so
they inherit the variable and the allowed classes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from hpc_det.pytorch.deepspeed.checkpoint_engine import deepspeeds_own_allowed, refused_names

_WORKERS = 4
"""Number of processes that read shards."""
_MORE = "more than tensors, numbers, texts, lists and maps; loading it could run code from the file"


def main(shards: str, universal: str) -> None:
    assert os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD") == "1"
    refused = {path: names for path in sorted(Path(shards).glob("*.pt")) if (names := refused_names(path))}
    if refused:  # the converter would refuse it, too, without the name of the file
        sys.exit("; ".join(f"{path.name} contains {', '.join(names)}: {_MORE}" for path, names in refused.items()))
    multiprocessing.set_start_method("fork")
    with deepspeeds_own_allowed():
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=shards,
                output_folder=universal,
                num_extract_workers=_WORKERS,
                num_merge_workers=_WORKERS // 2,  # these hold whole parameters
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
