"""Records a state root with the hpc_det of a checkout, which later versions have to read and continue.

    python -m tests.recorded.record [CHECKOUT]

Run it at a release, and before a change of a file format. CHECKOUT is a clone at some commit, by default this one; an
earlier commit is checked out with `git worktree add ../old COMMIT`. The result is the archive DATE-COMMIT.tar.gz in
this folder. It contains:

    experiments/1   finished                           4   failed at its fourth batch
                2   a finished search of four trials   5   created without a job
                3   paused at its seventh batch        6   in the queue of a Slurm that does not exist
    sgd/line        a TorchTrainer whose driver was killed in its third epoch, and its experiment 7
    experiments/8   a finished sweep of a Hydra app, without its pickles, which depend on the version of Python

The folder `sweep` beside the state root is the hydra.sweep.dir. `neutral` replaces the names of this machine.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
CODE = HERE / "code"
HOME = Path("/home/ada")
"""The recorded home folder; the state root is hpc_det in it, the code is in code, and the sweep in sweep."""
PYTHON = Path("/apps/hpc_det/bin/python3")
"""The recorded path of Python."""
PROFILE = """\
name: paper
scheduler: slurm
slots_per_node: 1
slot_type: cpu
"""
SLURM = {
    "sbatch": "echo 4711",
    "squeue": "exit 0",
    "scontrol": "exit 0",
    "sacct": "exit 0",
    "sinfo": "exit 0",
    "sprio": "exit 0",
}
"""A Slurm on paper: the shell text of each command."""
LEFT_OUT = re.compile(
    r"/(tensorboard|submitit|\.scheduler|__pycache__|\.bundles|\.hydra|snapshots/2)(/|$)"
    r"|/(\.index\.json|hill\.log|rendezvous\.json|import_path|[^/]*\.pkl)$"
)
"""Files that are large or short-lived, or depend on the version of Python."""
LONGEST_S = 120.0


class Recording:
    """The folders and processes of one recording."""

    def __init__(self, home: Path, checkout: Path) -> None:
        self.home, self.root, self.code = home, home / "hpc_det", home / "code"
        shutil.copytree(CODE, self.code, ignore=shutil.ignore_patterns("__pycache__"))
        self._stubs(home / "bin")
        self._env = {
            "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(home),
            "HPC_DET_ROOT": str(self.root),
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "LOGNAME": "ada",
            "USER": "ada",
        }

    def _stubs(self, folder: Path) -> None:
        folder.mkdir()
        for name, text in SLURM.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)

    def run(self, folder: str, *command: str, code: int | None = 0) -> str:
        """Run Python in a folder of the code; return what it prints. None: any exit code is right."""
        words = [sys.executable, *command]
        done = subprocess.run(words, cwd=self.code / folder, env=self._env, capture_output=True, text=True)
        if code is not None and done.returncode != code:
            raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def hpc_det(self, *arguments: str, code: int | None = 0) -> str:
        """Run the command line."""
        main = f"import sys; sys.path[0] = ''; from hpc_det.cli.main import main; sys.exit(main({[*arguments]!r}))"
        return self.run(".", "-c", main, code=code)

    def create(self, *options: str, code: int | None = 0, **config: object) -> None:
        overrides = (
            word for key, value in config.items() for word in ("--config", f"{key.replace('__', '.')}={value}")
        )
        self.hpc_det("experiment", "create", "line.yaml", "trial", *overrides, *options, code=code)


def record(recording: Recording) -> None:
    """Make the experiments, runs and sweep that the docstring of this module lists."""
    of_error = "{metric: error, smaller_is_better: true"
    recording.create("--follow")
    recording.create(
        "--follow",
        searcher=f"{of_error}, name: async_halving, max_length: {{batches: 8}}, max_trials: 4, num_rungs: 2}}",
        hyperparameters__learning_rate="{type: log, base: 10, minval: -3, maxval: -1}",
        checkpoint_storage="{save_experiment_best: 1, save_trial_best: 0, save_trial_latest: 0}",
    )
    recording.create(hyperparameters__is_paused="true")
    metrics = recording.root / "experiments/3/trials/1/metrics.jsonl"
    await_(lambda: metrics.exists() and '"steps": 5' in metrics.read_text())
    recording.hpc_det("experiment", "pause", "3")
    await_(lambda: "PAUSED" in recording.hpc_det("experiment", "list"))
    recording.create("--follow", hyperparameters__raise_at="3", code=None)
    recording.create("--paused")
    profile = recording.root / "conf/cluster/paper.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE)
    recording.create("--cluster", "paper")
    recording.run("driver", "driver.py", "line", "4", "2", code=-signal.SIGKILL)
    sweep = f"hydra.sweep.dir={recording.home / 'sweep'}"
    recording.run("sweep", "hill.py", "-m", "hydra/launcher=hpc_local", "x=1,2", sweep)


def await_(is_so: Callable[[], bool]) -> None:
    """Wait until `is_so()`."""
    end = time.monotonic() + LONGEST_S
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"nothing happened within {LONGEST_S:.0f} s")
        time.sleep(0.1)


def neutral(text: str, home: Path, checkout: Path) -> str:
    """Return a text with neutral names in place of this machine's."""
    python = Path(sys.executable)
    for found, name in {
        home: HOME,
        checkout: PYTHON.parents[1] / "lib",
        python: PYTHON,
        python.parent: PYTHON.parent,
        python.parents[1]: PYTHON.parents[1],
        Path(sys.base_prefix): Path("/usr"),
    }.items():
        text = text.replace(str(found), str(name))
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", text)


def files(home: Path) -> Iterator[Path]:
    """Yield the recorded files, links and folders, sorted."""
    for top in (home / "hpc_det", home / "sweep"):
        yield from (path for path in sorted(top.rglob("*")) if not LEFT_OUT.search(str(path)))


def archive(home: Path, checkout: Path, target: Path) -> None:
    """Write the recorded files to a compressed archive."""
    with tarfile.open(target, "w:gz", compresslevel=9) as tar:
        for path in files(home):
            entry = tarfile.TarInfo(neutral(str(path.relative_to(home)), home, checkout))
            entry.mode, entry.mtime = path.lstat().st_mode & 0o7777, path.lstat().st_mtime
            content = b""
            if path.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, neutral(os.readlink(path), home, checkout)
            elif path.is_dir():
                entry.type = tarfile.DIRTYPE
            else:
                content = path.read_bytes()
                if is_text(str(path)):
                    content = neutral(content.decode(), home, checkout).encode()
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def is_text(name: str) -> bool:
    """Return whether a recorded file is a text, in which names are replaced."""
    return not name.endswith((".pth", ".pt", "/key", "/own"))


def place(recorded: Path, home: Path) -> None:
    """Extract an archive to `home`, with the names of this machine, its Python and the folder `home`."""
    with tarfile.open(recorded) as tar:
        tar.extraction_filter = lambda member, _folder: member  # our own archive; Python 3.11.2 has no argument for it
        tar.extractall(home)
    replaced = {str(HOME): str(home), str(PYTHON): sys.executable, "node1": socket.gethostname()}
    replaced[str(PYTHON.parent)] = str(Path(sys.executable).parent)

    def own(text: str) -> str:
        for name, found in replaced.items():
            text = text.replace(name, found)
        return text

    for path in [*home.rglob("*")]:
        if path.is_symlink():
            target = own(os.readlink(path))
            path.unlink()
            path.symlink_to(target)
        elif path.is_file() and is_text(str(path)):
            status, text = path.stat(), path.read_text()
            if (changed := own(text)) != text:
                path.write_text(changed)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for path in [*home.rglob("*node1*")]:
        path.rename(path.with_name(own(path.name)))
    shutil.copytree(CODE, home / "code", ignore=shutil.ignore_patterns("__pycache__"))


def main(checkout: Path) -> int:
    git = ["git", "-C", str(checkout), "log", "-1", "--format=%cs-%h", "--abbrev=8"]
    name = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder:
        recording = Recording(Path(folder).resolve(), checkout)
        record(recording)
        target = HERE / f"{name}.tar.gz"
        archive(recording.home, checkout, target)
        print(recording.hpc_det("experiment", "list"))
    print(f"{target}: {os.path.getsize(target)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[1]).resolve()))
