"""The machine and the user: what every node must see, and where experiments are kept."""

from __future__ import annotations

import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import hpc_det
from hpc_det.doctor import Finding, Verdict
from hpc_det.errors import HpcDetError
from hpc_det.launch.watch.health import answers, folder_problem
from hpc_det.store.experiments import ExperimentStore, configured_root, danger
from hpc_det.view.formatting import count, size
from hpc_det.view.state import ExperimentView

SUBJECT = "this machine"
ANSWER_S = 5.0
"""A file server that takes longer does not answer."""
GIB = 2**30
LEAST_FREE, LITTLE_FREE = GIB, 20 * GIB
LOOKED_AT = 100
"""Experiments, the newest, whose journals are read."""
MOUNTS = Path("/proc/self/mounts")
# A login node may export its own disk to the others; nothing here can tell.
_MEMORY = ("tmpfs", "ramfs", "overlay", "rootfs", "squashfs")
_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))

_finding = partial(Finding, SUBJECT)


def findings(env: Mapping[str, str], *, has_nodes: bool) -> Iterator[Finding]:
    """`has_nodes`: jobs run on other machines than this one."""
    python = f"Python {platform.python_version()} in {sys.prefix}"
    yield _place(python, Path(sys.prefix), "make the environment in a folder", has_nodes)
    package = Path(hpc_det.__file__).parent
    if Path(sys.prefix) not in package.parents:
        yield _place(f"hpc_det in {package}", package, "install it in a folder", has_nodes)
    root = configured_root(env)
    name = f"HPC_DET_ROOT {root}" + ("" if "HPC_DET_ROOT" in env else " (the default)")
    if silence := answers({name: partial(_seen, root)}, ANSWER_S):
        yield _finding("problem", silence[0].text, "mend its file system, or set HPC_DET_ROOT to another folder")
        return
    yield _place(name, root, "set HPC_DET_ROOT to a folder", has_nodes)
    if root.exists():
        yield from _root(root)
    else:
        yield _new_root(root)


def _seen(root: Path) -> None:
    """Only to hear whether there is an answer."""
    os.path.exists(root)


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system of `path`, after the lines of /proc/self/mounts."""
    rows = [line.split() for line in mounts.splitlines() if line.count(" ") > 2]
    points = {Path(row[1].replace(r"\040", " ")): row[2] for row in rows}  # of two at one place the later one is seen
    resolved = path.resolve()
    return next((points[parent] for parent in (resolved, *resolved.parents) if parent in points), "unknown")


def _place(what: str, path: Path, action: str, has_nodes: bool) -> Finding:
    kind = file_system(path, MOUNTS.read_text())
    verdict = _verdict(kind, path.resolve()) if has_nodes else "ok"
    if verdict == "ok":
        return _finding("ok", f"{what} ({kind})")
    if verdict == "note":
        message = f"{what} lies on a disk ({kind}), which nodes may or may not see"
        return _finding("note", message, f"unless they see this very path: {action} that all nodes see")
    return _finding("problem", f"{what} is on this machine alone ({kind})", f"{action} that all nodes see")


def _verdict(kind: str, path: Path) -> Verdict:
    is_disk = kind in _DISKS
    if kind in _MEMORY or (is_disk and any(folder in (path, *path.parents) for folder in _TEMPORARY)):
        return "problem"
    return "note" if is_disk else "ok"


def _new_root(root: Path) -> Finding:
    above = next(parent for parent in root.parents if parent.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return _finding("ok", f"{root} is not there yet; the first experiment makes it")
    return _finding(
        "problem", f"{root} is not there, and you may not write in {above}", "set HPC_DET_ROOT to a folder of yours"
    )


def _root(root: Path) -> Iterator[Finding]:
    if wrong := answers({str(root): partial(folder_problem, root, shared=True)}, ANSWER_S):
        yield _finding("problem", wrong[0].text, "mend that, or set HPC_DET_ROOT to another folder of yours")
    else:
        yield _finding("ok", f"{root} takes files, and its clock is this machine's")
    yield _mode(root)
    yield _room(root)
    yield _experiments(ExperimentStore(root))


def _mode(root: Path) -> Finding:
    if problem := danger(root):
        return _finding("problem", f"{root} {problem[0]}; commands refuse it", problem[1])
    mode = stat.S_IMODE(root.stat().st_mode)
    message, remedy = f"{root} has mode {mode:04o}", f"chmod 700 {root}"
    if mode & 0o067:  # a group goes through to what is shared with it
        return _finding("note", f"{message}: others may look in", remedy)
    return _finding("ok", message)


def _room(root: Path) -> Finding:
    there = os.statvfs(root)
    free = there.f_bavail * there.f_frsize
    message = f"{size(free)} are free there, quotas aside"
    if free >= LITTLE_FREE:
        return _finding("ok", message)
    remedy = "delete checkpoints that nobody needs, or set HPC_DET_ROOT to a larger file system"
    return _finding("problem" if free < LEAST_FREE else "note", message, remedy)


def _experiments(store: ExperimentStore) -> Finding:
    found = list(store.all())
    looked_at = found[-LOOKED_AT:]
    settled, damaged = 0, []
    for folder in looked_at:
        try:
            settled += ExperimentView(folder).settled() is not None
        except HpcDetError:
            damaged.append(str(folder.id))
    message = f"{count(len(found), 'experiment')}, {len(looked_at) - settled - len(damaged)} open"
    message += f" of the last {LOOKED_AT}" if len(found) > LOOKED_AT else ""
    if not damaged:
        return _finding("ok", message)
    return _finding(
        "note", f"{message}; files of {', '.join(damaged)} are damaged", "`hpc-det experiment describe ID` says how"
    )
