"""What several ranks put into one checkpoint: which rank copies which file, and their metadata merged."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_det.compat.det_core.distributed import DistributedContext

Selector = Callable[[str], bool]
"""Returns whether a path relative to the checkpoint is taken; names of folders end with "/"."""


def names_in(folder: Path) -> list[str]:
    """Return the paths of the files and folders below `folder`, relative to it; those of folders end with "/"."""
    paths = sorted(folder.rglob("*"))
    return [f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}" for path in paths]


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the files, and create the folders, with these names."""
    for name in names:
        if name.endswith("/"):
            (target / name).mkdir(parents=True, exist_ok=True)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def shares(distributed: DistributedContext, folder: Path | None, selector: Selector | None) -> list[str]:
    """Return the names in `folder` that this rank copies. Collective.

    A folder that several ranks give is copied by the lowest of them, and by those with a selector. The lowest rank
    copies a file that several have with the same content. Raises RuntimeError on every rank if contents differ, or if
    no rank gives a folder.
    """
    status = os.stat(folder) if folder else None
    places = distributed.allgather((status.st_dev, status.st_ino) if status else None)
    if not any(places):
        raise RuntimeError("upload(shard=True): no rank gives a folder; at least one rank needs a ckpt_dir")
    own: list[str] = []
    if folder and (selector or places.index(places[distributed.rank]) == distributed.rank):
        own = [name for name in names_in(folder) if selector is None or selector(name)]
    owners: dict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(distributed.allgather(own)):
        for name in names:
            owners[name.rstrip("/")].append(rank)
    several = {name for name, ranks in owners.items() if len(ranks) > 1}
    digests = {name.rstrip("/"): _digest(folder, name) for name in own if folder and name.rstrip("/") in several}
    by_rank = distributed.allgather(digests)
    _insist_on_equal({name: [by_rank[rank][name] for rank in owners[name]] for name in several}, owners)
    return [name for name in own if owners[name.rstrip("/")][0] == distributed.rank]


def _digest(folder: Path, name: str) -> str:
    if name.endswith("/"):
        return "a folder"
    with open(folder / name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _insist_on_equal(digests: Mapping[str, Sequence[str]], owners: Mapping[str, Sequence[int]]) -> None:
    if different := [name for name, found in sorted(digests.items()) if len(set(found)) > 1]:
        raise RuntimeError(
            "upload: ranks have different files with the same name: "
            + "; ".join(f"{name} of ranks {', '.join(map(str, owners[name]))}" for name in different)
        )


def merged(metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata of all ranks as one dict. Raises RuntimeError where values differ."""
    found: dict[str, Any] = {}
    conflicts: list[str] = []
    for each in metadata:
        _merge(found, each, "", conflicts)
    if conflicts:
        raise RuntimeError(f"checkpoint: metadata of ranks differ in {', '.join(dict.fromkeys(conflicts))}")
    return found


def _merge(into: dict[str, Any], more: Mapping[str, Any], path: str, conflicts: list[str]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, f"{path}/{key}", conflicts)
        elif key in into and into[key] != value:
            conflicts.append(f"{path}/{key}")
        else:
            into[key] = value
