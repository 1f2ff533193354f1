"""Stand-ins for container runtimes: executables that accept and refuse the same flags and then run the command.

The "image" has a python3 and the commands of this system, and nothing of the job's environment. Nothing is mounted:
every mounted path must exist and keep its name, except hpc_det's, which the image's python3 finds in the checkout.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

IMAGE = "site/torch:2.10"
_CHECKOUT = Path(__file__).parents[2]

_CHECK_MOUNT = """
mounted() {
  IFS=: read -r source target options <<<"$1"
  [[ -e $source && $target == /* ]] || { echo "$0: cannot mount $1" >&2; exit 125; }
}
# Like the real ones: the container ignores no signals that the caller ignores, and has the image's environment.
inside() { env --default-signal -i PATH="$image/bin:/usr/bin:/bin" FROM=the-image "$@"; }
"""
_APPTAINER = """
[[ $1 == exec ]] || exit 64; shift
while [[ $1 == --* ]]; do
  case $1 in
    --cleanenv) clean=1 ;;
    --pwd=*) cd "${1#*=}" || exit ;;
    --bind=*) mounted "${1#*=}" ;;
    *) echo "$0: unknown flag $1" >&2; exit 64 ;;
  esac
  shift
done
[[ $clean && $1 == docker://IMAGE ]] || exit 64; shift
inside "$@"
"""
_PODMAN = """
[[ $1 == run ]] || exit 64; shift
while [[ $1 == --* ]]; do
  case $1 in
    --rm | --network=host | --pid=host | --uts=host | --userns=keep-id) ;;
    --security-opt=label=disable | --ipc=host | --entrypoint= | --shm-size=*b) ;;
    --workdir=*) cd "${1#*=}" || exit ;;
    --volume=*) mounted "${1#*=}" ;;
    *) echo "$0: unknown flag $1" >&2; exit 125 ;;
  esac
  shift
done
[[ $1 == IMAGE ]] || exit 125; shift
# podman's monitor, a process in another session, starts the container.
export -f inside; export image
setsid --wait bash -c 'inside "$@"' monitor "$@"
"""
_RUNTIMES = {"apptainer": _APPTAINER, "podman": _PODMAN}


@dataclass(frozen=True)
class Runtime:
    folder: Path
    name: str

    @classmethod
    def install(cls, name: str, folder: Path) -> Runtime:
        """Install the stand-in in `folder`/bin, which a test puts on PATH."""
        image = folder / "image"
        _executable(folder / "bin" / name, _stand_in(name, folder, image))
        _executable(
            image / "bin" / "python3",
            f'#!/bin/bash\nPYTHONPATH=${{PYTHONPATH//"/opt/hpc-det"/{shlex.quote(str(_CHECKOUT))}}} '
            f'exec {shlex.quote(sys.executable)} "$@"\n',
        )
        return cls(folder, name)

    @property
    def path(self) -> str:
        return f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"

    @property
    def argv(self) -> list[str]:
        """Return the arguments of the last call."""
        return (self.folder / "argv").read_bytes().decode().split("\0")[:-1]


def _stand_in(name: str, folder: Path, image: Path) -> str:
    known = f"argv_file={shlex.quote(str(folder / 'argv'))} image={shlex.quote(str(image))}"
    note = 'printf \'%s\\0\' "$@" >"$argv_file"'
    return f"#!/bin/bash\n{known}\n{note}\n{_CHECK_MOUNT}{_RUNTIMES[name].replace('IMAGE', IMAGE)}"


def _executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
