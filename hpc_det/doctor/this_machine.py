"""Checks of this machine and user: folders that all nodes must see, and the folder of experiments."""

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
from hpc_det.node.import_bundle import UnusableBundle, usable_bundle
from hpc_det.store.experiments import ExperimentStore, configured_root, danger
from hpc_det.submit.bundle import bundle_path
from hpc_det.view.formatting import count, size
from hpc_det.view.state import ExperimentView

SUBJECT = "this machine"
ANSWER_S = 5.0
"""Seconds after which a file server counts as not answering."""
GIB = 2**30
LEAST_FREE, LITTLE_FREE = GIB, 20 * GIB
"""Bytes of free space below which there is a problem or a note."""
LOOKED_AT = 100
"""Number of newest experiments whose journals are read."""
MOUNTS = Path("/proc/self/mounts")
# A login node may export its disk to other nodes, which cannot be detected here: so a disk is only worth a note.
_MEMORY = ("tmpfs", "ramfs", "overlay", "rootfs", "squashfs")
_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))  # separate on each node

_finding = partial(Finding, SUBJECT)


def findings(env: Mapping[str, str], *, has_nodes: bool) -> Iterator[Finding]:
    """Yield the findings for this machine. `has_nodes`: jobs run on other machines."""
    python = f"Python {platform.python_version()} in {sys.prefix}"
    yield _place(python, Path(sys.prefix), "make the environment in a folder", has_nodes)
    package = Path(hpc_det.__file__).parent
    if Path(sys.prefix) not in package.parents:
        yield _place(f"hpc_det in {package}", package, "install it in a folder", has_nodes)
    root = configured_root(env)
    name = f"HPC_DET_ROOT {root}" + ("" if "HPC_DET_ROOT" in env else " (the default)")
    # answers() uses a child process: a call to a file server that does not answer cannot be interrupted
    if silence := answers({name: partial(_seen, root)}, ANSWER_S):
        yield _finding("problem", silence[0].text, "repair its file system, or set HPC_DET_ROOT to another folder")
        return
    yield from _imports(root, has_nodes)
    yield _place(name, root, "set HPC_DET_ROOT to a folder", has_nodes)
    if root.exists():
        yield from _root(root)
    else:
        yield _new_root(root)


def _seen(root: Path) -> None:
    """Access the folder, to see whether its file system answers."""
    os.path.exists(root)


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system of `path`. `mounts`: the content of /proc/self/mounts."""
    rows = [line.split() for line in mounts.splitlines() if line.count(" ") > 2]
    # of two mounts at one point, the later one is visible
    points = {Path(row[1].replace(r"\040", " ")): row[2] for row in rows}
    resolved = path.resolve()
    return next((points[parent] for parent in (resolved, *resolved.parents) if parent in points), "unknown")


def _place(what: str, path: Path, action: str, has_nodes: bool) -> Finding:
    kind = file_system(path, MOUNTS.read_text())
    verdict = _verdict(kind, path.resolve()) if has_nodes else "ok"
    if verdict == "ok":
        return _finding("ok", f"{what} ({kind})")
    if verdict == "note":
        message = f"{what} is on a disk ({kind}), which nodes may or may not see"
        return _finding("note", message, f"unless all nodes see this path: {action} that they see")
    return _finding("problem", f"{what} is only on this machine ({kind})", f"{action} that all nodes see")


def _imports(root: Path, has_nodes: bool) -> Iterator[Finding]:
    """Yield how ranks import packages, if the Python environment is on a file system that nodes share."""
    kind = file_system(Path(sys.prefix), MOUNTS.read_text())
    if not has_nodes or _verdict(kind, Path(sys.prefix).resolve()) != "ok":
        return
    bundle = bundle_path(root)
    try:
        usable_bundle(str(bundle)).close()
    except UnusableBundle:
        yield _finding("ok", f"imports of each rank read thousands of files on {kind}; `environment.bundle` avoids it")
    else:
        yield _finding("ok", f"ranks with `environment.bundle` import packages from one file on {kind}, {bundle}")


def _verdict(kind: str, path: Path) -> Verdict:
    is_disk = kind in _DISKS
    if kind in _MEMORY or (is_disk and any(folder in (path, *path.parents) for folder in _TEMPORARY)):
        return "problem"
    return "note" if is_disk else "ok"


def _new_root(root: Path) -> Finding:
    above = next(parent for parent in root.parents if parent.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return _finding("ok", f"{root} does not exist yet; the first experiment creates it")
    return _finding(
        "problem", f"{root} does not exist, and you may not write to {above}", "set HPC_DET_ROOT to a folder of yours"
    )


def _root(root: Path) -> Iterator[Finding]:
    if wrong := answers({str(root): partial(folder_problem, root, shared=True)}, ANSWER_S):
        yield _finding("problem", wrong[0].text, "repair that, or set HPC_DET_ROOT to another folder of yours")
    else:
        yield _finding("ok", f"{root} is writable, and its clock agrees with this machine's")
    yield _mode(root)
    yield _room(root)
    yield _experiments(ExperimentStore(root))


def _mode(root: Path) -> Finding:
    if problem := danger(root):
        return _finding("problem", f"{root} {problem[0]}; commands do not run with it", problem[1])
    mode = stat.S_IMODE(root.stat().st_mode)
    message, remedy = f"{root} has mode {mode:04o}", f"chmod 700 {root}"
    if mode & 0o067:  # the group may have x, to reach experiments that are shared with it
        return _finding("note", f"{message}: other users have access", remedy)
    return _finding("ok", message)


def _room(root: Path) -> Finding:
    there = os.statvfs(root)
    free = there.f_bavail * there.f_frsize  # f_bavail: without the blocks that are reserved for root
    message = f"{size(free)} are free there, without regard to quotas"
    if free >= LITTLE_FREE:
        return _finding("ok", message)
    remedy = "delete checkpoints that you do not need, or set HPC_DET_ROOT to a larger file system"
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
    message += f" among the last {LOOKED_AT}" if len(found) > LOOKED_AT else ""
    if not damaged:
        return _finding("ok", message)
    return _finding(
        "note", f"{message}; files of {', '.join(damaged)} are damaged", "see `hpc-det experiment describe ID`"
    )
