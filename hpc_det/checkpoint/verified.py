"""Choosing the checkpoint that a gang resumes from: all ranks verify its files together, and rank 0 decides.

Each node reads the files that its ranks will load, each byte once: the ranks of a node share the blocks. Files that no
rank loads are divided among all nodes. Nodes read from the file system, not from each other: a parallel file system
serves many readers of one file at once, and bytes from another node would not be in the page cache, so that a second
copy of the state would take memory on each node (docs/reference/performance.md has measurements of both).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import FORMAT, MANIFEST, Committed, newest_good, read_manifest
from hpc_det.checkpoint.committed_folder import OddManifest, in_words, irregularities
from hpc_det.checkpoint.damaged import set_aside
from hpc_det.checkpoint.object_store import Mirror
from hpc_det.checkpoint.reading import Block, blocks_of, differences, read_blocks
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError

Reads = Callable[[str], bool]
"""Returns whether this rank will load the file with this name."""


@dataclass(frozen=True)
class Readers:
    """The ranks of a trial as the readers of its checkpoints. All methods are collective."""

    distributed: Distributed
    reads: Reads

    def newest(self, checkpoints: Path, mirror: Mirror | None) -> tuple[Path, int] | None:
        """Return the folder and batches of the newest undamaged checkpoint, or None.

        Rank 0 prints which ones it skips, and sets damaged ones aside. Raises HpcDetError if rank 0 has downloaded the
        checkpoint from the store, and another node does not find it undamaged.
        """
        choice = self._choose(checkpoints, mirror) if self.distributed.is_chief else None
        # The other ranks take part in each check until rank 0 has chosen; it broadcasts the checks from `_choose`.
        while "look" in (message := self.distributed.broadcast_json(choice)):
            self.damage(Path(message["look"]))
        if not message["found"]:
            return None
        folder = checkpoints / message["found"]
        if not message["is_read"]:  # rank 0 has downloaded and checked it alone
            self.insist_on_whole(folder)
        return folder, message["steps"]

    def insist_on_whole(self, folder: Path) -> None:
        """Raise HpcDetError with all problems of the checkpoint in `folder`, if there are any."""
        if problems := self.damage(folder):
            raise HpcDetError([f"{folder}: damaged: {problem}; use another checkpoint" for problem in problems])

    def _choose(self, checkpoints: Path, mirror: Mirror | None) -> dict[str, Any]:
        """On rank 0, while the others wait in `newest`: return the chosen checkpoint for them.

        Returns {"found": uuid or None, "steps": batches, "is_read": whether all nodes have verified it}.
        """
        read: set[str] = set()

        def damage(checkpoint: Committed) -> list[str]:
            read.add(checkpoint.uuid)
            self.distributed.broadcast_json({"look": str(checkpoint.path)})
            return self.damage(checkpoint.path)

        checkpoint, skipped = (mirror.newest_good if mirror else partial(newest_good, checkpoints))(damage, set_aside)
        for problem in skipped:
            print(f"hpc-det: skipped: {problem}", flush=True)
        if checkpoint is None:
            return {"found": None}
        return {"found": checkpoint.uuid, "steps": checkpoint.steps, "is_read": checkpoint.uuid in read}

    def damage(self, folder: Path) -> list[str]:
        """Return the problems of the state of the checkpoint in `folder` that any node has found.

        Without a manifest, as in a checkpoint of Determined, no file is read. Raises HpcDetError if a rank does not
        find the manifest, which is not damage but a folder that is not shared between the nodes.
        """
        gang = self.distributed
        # Rank 0 sends the entries: thousands of ranks need not read the manifests, of which there is one for each node.
        has_manifest, irregular, entries = gang.broadcast_json(_look_at(folder) if gang.is_chief else None)
        if irregular or not has_manifest:
            return [*irregular]
        files = {name: FileEntry(size=size, crc32=crc32) for name, (size, crc32) in entries.items()}
        is_seen = (folder / MANIFEST).exists()
        # the lowest rank of a node identifies the node
        own = {"node": gang.rank - gang.local_rank, "manifest": is_seen, "reads": [*filter(self.reads, files)]}
        ranks = gang.gather_json(own)
        if blind := [number for number, rank in enumerate(ranks) if not rank["manifest"]]:
            raise HpcDetError(
                f"{folder}: rank {', '.join(map(str, blind))} sees no manifest there; checkpoints belong on a file "
                f"system that all nodes share: see checkpoint_storage"
            )
        shares = shared([rank["node"] for rank in ranks], [rank["reads"] for rank in ranks], files)
        found = gang.gather_json(read_blocks(folder, files, shares[gang.rank], CRC))
        nodes: dict[int, list[Any]] = {}
        for rank, share, results in zip(ranks, shares, found, strict=True):
            nodes.setdefault(rank["node"], []).extend(zip(share, results, strict=True))
        wrong = (in_words(differences(_those_of(files, read), read, CRC)) for read in nodes.values())
        return list(dict.fromkeys(chain(*wrong)))  # each once: several nodes may find the same problem


def _look_at(folder: Path) -> tuple[bool, list[str], dict[str, tuple[int, int]]]:
    """On rank 0, before any file but the manifests is opened: return whether there is a manifest, and the problems.

    Then size and crc32 of each file of the state, by name.
    """
    try:
        checkpoint = read_manifest(folder)
        problems = in_words(checkpoint.irregularities(folder, is_code=False))
        return True, problems, {name: (entry.size, entry.crc32) for name, entry in checkpoint.state.items()}
    except FileNotFoundError:
        return False, in_words(irregularities(folder)), {}
    except (OddManifest, OSError) as error:
        return True, [FORMAT.problem(error)], {}


def shared(nodes: Sequence[int], reads: Sequence[Sequence[str]], files: Mapping[str, FileEntry]) -> list[list[Block]]:
    """Return the blocks that each rank reads, by rank.

    `nodes`: the node of each rank. `reads`: the names of the files that each rank loads. `files`: all files to read.
    """
    every = sorted(set(nodes))
    names: dict[int, set[str]] = {node: set() for node in every}
    ranks: dict[int, list[int]] = {node: [] for node in every}
    for rank, (node, wanted) in enumerate(zip(nodes, reads, strict=True)):
        names[node].update(wanted)
        ranks[node].append(rank)
    unwanted = sorted(files.keys() - set().union(*names.values()))
    for number, name in enumerate(unwanted):
        names[every[number % len(every)]].add(name)
    shares: list[list[Block]] = [[] for _ in nodes]
    for node in every:
        blocks = blocks_of({name: files[name] for name in sorted(names[node])}, CRC)
        for place, rank in enumerate(ranks[node]):
            shares[rank] = blocks[place :: len(ranks[node])]  # the ranks of a node take blocks in turn
    return shares


def _those_of(files: Mapping[str, FileEntry], read: Sequence[tuple[Block, Any]]) -> dict[str, FileEntry]:
    return {block.name: files[block.name] for block, _ in read}
