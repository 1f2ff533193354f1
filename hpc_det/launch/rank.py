"""The process of a rank that runs a trial class, started once per slot by a launcher.

python3 -m hpc_det.launch.rank module:Class
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import suppress

from hpc_det.distributed.rank_process import RankProcess, join_gang, note_error
from hpc_det.errors import HpcDetError
from hpc_det.node.forking import leave
from hpc_det.node.frame_modules import modules_from_frames
from hpc_det.node.import_bundle import import_from_bundle


def main(trial_name: str) -> int:
    process = join_gang(os.environ)
    code = _run(trial_name, process)
    process.report_exit(code)
    return code


def _run(trial_name: str, process: RankProcess) -> int:
    try:
        # Imported objects live as long as the process, so searching them for garbage is useless, and it would take a
        # fifth of the time to the first batch.
        gc.disable()
        import_from_bundle(os.environ)
        with modules_from_frames():
            from hpc_det.pytorch.loop.harness import run_trial

            gc.freeze()
            gc.enable()
            run_trial(trial_name, process, os.environ)  # the first step of an optimizer imports torch._dynamo
    except BaseException as error:
        with suppress(OSError):  # the log may be on a full disk
            if isinstance(error, HpcDetError):
                print(f"hpc-det: {error}", file=sys.stderr)
            else:
                traceback.print_exc()
        note_error(process.attempt, int(os.environ["RANK"]), error)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1]))
