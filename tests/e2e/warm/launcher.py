"""python3 launcher.py --trial module:Class"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpc_det.launch import direct
from hpc_det.launch.launchers.arguments import Launch, parse
from hpc_det.store.attempt import Attempt


class Warm(Launch):
    @property
    def rank_command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("stand_in.py")), *self.command]


if __name__ == "__main__":
    parsed = parse(sys.argv[1:], "direct")
    sys.exit(direct.run(Warm(parsed.overrides, parsed.command), Attempt.from_env(os.environ)))
