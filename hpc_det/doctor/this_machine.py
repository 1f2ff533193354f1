"""Checks of this machine and user: folders that all nodes must see, and the folder of experiments."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import hpc_det
from hpc_det.doctor import Finding, Verdict
from hpc_det.errors import HpcDetError, count
from hpc_det.launch import staged
from hpc_det.launch.mounted_image import MOUNTERS
from hpc_det.launch.watch.health import answers, folder_problem
from hpc_det.node import mounts
from hpc_det.node.import_bundle import UnusableBundle, usable_bundle
from hpc_det.schedulers.site import ThisMachine
from hpc_det.store.experiments import VARIABLE, ExperimentStore, configured_root, danger
from hpc_det.submit.bundle import bundle_path, site_folders
from hpc_det.view.formatting import size
from hpc_det.view.state import ExperimentView

SUBJECT = "this machine"
ANSWER_S = 5.0
"""Seconds after which a file server counts as not answering."""
GIB = 2**30
LEAST_FREE, LITTLE_FREE = GIB, 20 * GIB
"""Bytes of free space below which there is a problem or a note."""
IMPORT_CALLS = 15_000
"""Calls to look at files until a rank's first step (docs/reference/performance.md, `getmodule` from frames)."""
LOOKED_AT = 100
"""Number of newest experiments whose journals are read."""
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))  # separate on each node

_finding = partial(Finding, SUBJECT)


def findings(env: Mapping[str, str], *, has_nodes: bool) -> Iterator[Finding]:
    """Yield the findings for this machine. `has_nodes`: jobs run on other machines."""
    python = f"Python {platform.python_version()} in {sys.prefix}"
    yield _place(python, Path(sys.prefix), "make the environment in a folder", has_nodes)
    package = Path(hpc_det.__file__).parent
    if Path(sys.prefix) not in package.parents:
        yield _place(f"hpc_det in {package}", package, "install it in a folder", has_nodes)
    if not has_nodes:
        yield from _devices(ThisMachine.look(env))
    root, origin = configured_root(env)
    name = f"HPC_DET_ROOT {root}" + ("" if origin == VARIABLE else f" ({origin})")
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


def _devices(machine: ThisMachine) -> Iterator[Finding]:
    yield _finding("ok", machine.in_words)
    if machine.problem:
        what, _, remedy = machine.problem.partition("; ")
        yield _finding("note", f"{what}: trials on this machine train on CPUs", remedy)


def _seen(root: Path) -> None:
    """Access the folder, to see whether its file system answers."""
    os.path.exists(root)


def _place(what: str, path: Path, action: str, has_nodes: bool) -> Finding:
    kind = mounts.file_system(path, mounts.MOUNTS.read_text())
    verdict = _verdict(kind, path.resolve()) if has_nodes else "ok"
    if verdict == "ok":
        return _finding("ok", f"{what} ({kind})")
    if verdict == "note":
        message = f"{what} is on a disk ({kind}), which nodes may or may not see"
        return _finding("note", message, f"unless all nodes see this path: {action} that they see")
    return _finding("problem", f"{what} is only on this machine ({kind})", f"{action} that all nodes see")


def _imports(root: Path, has_nodes: bool) -> Iterator[Finding]:
    """Yield how ranks import packages, if the Python environment is on a file system that nodes share."""
    kind = mounts.file_system(Path(sys.prefix), mounts.MOUNTS.read_text())
    if not has_nodes or _verdict(kind, Path(sys.prefix).resolve()) != "ok":
        return
    bundle = bundle_path(root)
    try:
        usable_bundle(str(bundle)).close()
    except UnusableBundle:
        yield _finding("ok", f"imports of each rank read thousands of files on {kind}; `environment.bundle` avoids it")
    else:
        yield _finding("ok", f"ranks with `environment.bundle` import packages from one file on {kind}, {bundle}")
    yield _staging(kind)


def _staging(kind: str) -> Finding:
    """Return whether this machine could use `environment.stage`, and what it costs not to."""
    began = time.monotonic()
    records = [record for site in site_folders() for record in Path(site).glob("*.dist-info/RECORD")]
    for record in records:
        record.stat()
    call_s = (time.monotonic() - began) / max(len(records), 1)
    files = sum(record.read_bytes().count(b"\n") for record in records)
    cost = f"{files:,} files of packages on {kind}, {call_s * 1e3:.2g} ms to look at one: an import of torch takes "
    cost += f"about {call_s * IMPORT_CALLS:.2g} s longer"
    base = staged.folders("")[0]
    if why := staged.why_unsuitable(base, 0):
        return _finding("ok", f"{cost}; if the nodes are like this machine, `environment.stage` has no effect: {why}")
    mounter = next(filter(None, map(shutil.which, MOUNTERS)), None)
    image = f"`image` mounts with {mounter}" if mounter else "`image` needs squashfuse or apptainer, which are missing"
    return _finding("ok", f"{cost}; `environment.stage: tar` copies them to {base} on each node, and {image} here")


def _verdict(kind: str, path: Path) -> Verdict:
    is_disk = kind in mounts.DISKS  # a login node may export it to other nodes, which cannot be detected here
    if kind in mounts.MEMORY or (is_disk and any(folder in (path, *path.parents) for folder in _TEMPORARY)):
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
