"""The entry point of a rank: python3 -m hpc_det.launch.rank module:Class, started once per slot by a launcher."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import suppress

from hpc_det.distributed.rank_process import RankProcess, join_gang, leave, note_error
from hpc_det.errors import HpcDetError


def main(trial_name: str) -> int:
    process = join_gang(os.environ)
    code = _run(trial_name, process)
    process.report_exit(code)
    return code


def _run(trial_name: str, process: RankProcess) -> int:
    try:
        # What an import makes stays: to look through it for garbage would be a fifth of the time until the first batch.
        gc.disable()
        from hpc_det.pytorch.loop.harness import run_trial

        gc.freeze()
        gc.enable()
        run_trial(trial_name, process, os.environ)
    except BaseException as error:
        with suppress(OSError):  # the log is on a full disk
            if isinstance(error, HpcDetError):
                print(f"hpc-det: {error}", file=sys.stderr)
            else:
                traceback.print_exc()
        note_error(process.attempt, int(os.environ["RANK"]), error)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1]))
