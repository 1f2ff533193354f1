"""The types of mounted file systems (proc(5), /proc/self/mounts)."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
MEMORY = ("tmpfs", "ramfs", "overlay", "rootfs", "squashfs")
DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system of `path`. `mounts`: the content of /proc/self/mounts."""
    rows = [line.split() for line in mounts.splitlines() if line.count(" ") > 2]
    # of two mounts at one point, the later one is visible
    points = {Path(row[1].replace(r"\040", " ")): row[2] for row in rows}
    resolved = path.resolve()
    return next((points[parent] for parent in (resolved, *resolved.parents) if parent in points), "unknown")
