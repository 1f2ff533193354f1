"""Stubs of PBS' commands, which record their calls and give a test's answers; and scripts run as on a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.stub import Stub
from tests.wait import DEADLINE_S

COPIES = 'copy=$(mktemp -p "${PBS_TMPDIR:-${TMPDIR:-/var/tmp}}") && rm "$copy" || exit 1'
"""Shell code that copies a file into a temporary folder, as qsub does with the script."""


class StubSite:
    def __init__(self, folder: Path, stub: Stub) -> None:
        self._folder = folder
        folder.mkdir()
        noted = f"printf '%s\\n' \"$(basename $0) $*\" >>'{folder}/calls'"
        version = '[ "$1" = --version ] && echo "pbs_version = 23.06.06" && exit'
        stub(
            "qsub",
            f"{version}\n{noted}\n{COPIES}\n"
            f"cat '{folder}/id' 2>/dev/null || {{ echo 'qsub: not from here' >&2; exit 1; }}",
        )
        stub("qdel", f"{noted}\nexit $(cat '{folder}/qdel' || echo 0) 2>/dev/null")
        stub("qstat", f"{noted}\ncat '{folder}/qstat'; cat '{folder}/qstat.err' >&2; exit $(cat '{folder}/qstat.rc')")
        own = 'PBS_JOBID="$PBS_JOBID" PBS_NODEFILE="$PBS_NODEFILE" HPC_DET_TEST_ID="$HPC_DET_TEST_ID"'
        stub("pbs_tmrsh", f'shift; exec env -i PATH=/bin:/usr/bin {own} "$@"')
        self.next_id("12.pbshead")
        self.answer({})

    def next_id(self, pbs_id: str) -> None:
        """Set the id of the next submission."""
        (self._folder / "id").write_text(f"{pbs_id}\n")

    def refuse_qsub(self) -> None:
        (self._folder / "id").unlink()

    def answer(self, jobs: dict[str, Any], said: str = "", code: int = 0) -> None:
        """Set the output, the text on stderr and the exit code of qstat."""
        self.answer_text(json.dumps({"timestamp": 1, "Jobs": jobs}), said, code)

    def answer_text(self, text: str, said: str = "", code: int = 0) -> None:
        for name, content in (("qstat", text), ("qstat.err", said), ("qstat.rc", str(code))):
            (self._folder / name).write_text(content)

    def refuse_qdel(self, code: int) -> None:
        (self._folder / "qdel").write_text(str(code))

    def calls(self, command: str) -> list[str]:
        """Return the arguments of each call of the command."""
        path = self._folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == command]

    def start(
        self, script: Path, pbs_id: str, nodes: str = "n1", successor_of: str | None = None, **more: str
    ) -> Running:
        """Start the script in a new session, as PBS does. `nodes`: the lines of PBS_NODEFILE."""
        nodefile = self._folder / f"nodes.{pbs_id}"
        nodefile.write_text("".join(f"{node}\n" for node in nodes.split()))
        env = {name: os.environ[name] for name in ("PATH", "HOME", "HPC_DET_TEST_ID")}
        env |= {"PBS_JOBID": pbs_id, "PBS_NODEFILE": str(nodefile)}
        env |= {"SUBMITIT_PBS_JOB_ID": successor_of} if successor_of else {}
        env |= more
        return Running(subprocess.Popen(["bash", script], env=env, cwd="/", start_new_session=True))


class Running:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def term(self) -> None:
        """Send TERM to every process of the first node, as PBS does."""
        os.killpg(self._process.pid, signal.SIGTERM)

    def end(self) -> int:
        return self._process.wait(DEADLINE_S)
