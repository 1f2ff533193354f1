"""The files of ranks in a checkpoint, which are in a folder for each node if the gang has several nodes.

    rank-R.pth, shard-R.pth       of a gang on one node: at the top of the checkpoint's folder
    ranks-8-15/shard-8.pth ...    of several nodes: the large files of ranks 8 to 15, each written by its rank
               small-files.zip    their small files, which rank 8 has received and written
               manifest.json      {"files": {name: {"size", "crc32"}}, "crc32"}

Thousands of ranks that create files in one folder wait for each other on a parallel file system, and so do readers of a
manifest of all files. So the manifest of the checkpoint lists the manifest of each node, with its checksum.
"""

from __future__ import annotations

import re

SMALL_FILES = "small-files.zip"
SMALL_BYTES = 256 << 10
"""Most bytes of a small file. Larger ones take longer to send than to write (docs/reference/performance.md)."""
_OF_A_RANK = re.compile(r"(?:rank|shard)-(\d+)\.pth")
_FOLDER = re.compile(r"ranks-(\d+)-(\d+)")


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pth"


def shard_file(rank: int) -> str:
    return f"shard-{rank}.pth"


def is_of_a_rank(name: str) -> bool:
    return bool(_OF_A_RANK.fullmatch(name))


def node_folder(first: int, size: int) -> str:
    """Return the name of the folder for the files of the `size` ranks from `first` on."""
    return f"ranks-{first}-{first + size - 1}"


def is_node_folder(name: str) -> bool:
    return bool(_FOLDER.fullmatch(name))


def contains(stored: str, name: str) -> bool:
    """Return whether `stored`, a file of a checkpoint, is the file `name` of a rank, or may contain it."""
    folder, _, last = stored.rpartition("/")
    return stored == name or (last in (name, SMALL_FILES) and covers(folder, name))


def covers(folder: str, name: str) -> bool:
    """Return whether the file `name` of a rank belongs into this folder."""
    ranks, rank = _FOLDER.fullmatch(folder), _OF_A_RANK.fullmatch(name)
    return bool(ranks and rank and int(ranks[1]) <= int(rank[1]) <= int(ranks[2]))
