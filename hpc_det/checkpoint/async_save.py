"""One save of a checkpoint: the part of each rank, in the training thread or in a background thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from hpc_det.checkpoint.committed import manifest_of
from hpc_det.checkpoint.node_folders import (
    SMALL_BYTES,
    SMALL_FILES,
    is_of_a_rank,
    node_folder,
)
from hpc_det.checkpoint.rank_files import packed, unpacked, write_archive
from hpc_det.checkpoint.sealed_files import SaveAbandoned
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.checkpoint.staging import Staging
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_messages import GangMessages, RankGone
from hpc_det.node import full_disk
from hpc_det.node.files import make_folders
from hpc_det.node.suspension import AwakeClock

SILENT_S = 1800.0  # one block may wait for a file server to recover
"""Seconds without a report from any rank to rank 0 after which a save fails."""
REPORT_S = 20.0
"""Seconds between two progress reports of a rank to rank 0, and of rank 0 to all ranks."""
LOOK_S = 1.0
"""Seconds between two checks of the progress of a save."""


# Kinds of messages. Entries of files go to the first rank of the node, and from there to rank 0. The end of a save, its
# progress, and the failure of a node's ranks take the same connections.
_FILES, _ENDED, _FAILED = "files of a checkpoint", "end of a save", "failure of a save"
# In a gang of several nodes: the first rank of a node has made its folder; the small files of a rank.
_FOLDER, _SMALL = "folder of a node", "small files"


class AsyncSave:
    """The part of one rank in one save.

    Ranks exchange messages instead of collectives, which training uses at the same time. Rank 0 exchanges messages
    with the first rank of each node only, and those with the ranks of their nodes.
    """

    def __init__(self, staging: Staging, distributed: Distributed) -> None:
        self.staging = staging
        self._messages, self._node = distributed.messages, distributed.node_messages
        self._leaders = distributed.leaders
        """The first rank of each node."""
        self._is_chief, self._is_leader = distributed.is_chief, distributed.local_rank == 0
        self._folder = ""
        """The folder for the files of this node's ranks; "": they are at the top, since there is one node."""
        if distributed.nodes > 1:
            self._folder = node_folder(distributed.rank - distributed.local_rank, distributed.local_size)
        self._small: dict[str, bytes] = {}
        """The files of this rank that the first rank of the node writes."""
        self._entries: dict[str, FileEntry] = {}
        self._abandoned = Event()
        self._reported = self._relayed = time.monotonic()
        self._blocks = 0
        """Blocks that this rank has begun to write."""
        self._relayed_work = 0

    @property
    def progress(self) -> int:
        """A number that grows while ranks write, as far as this rank knows."""
        from_rank_0 = self._messages if self._is_leader else self._node
        return self._work + (0 if self._is_chief else from_rank_0.arrivals(_ENDED))

    @property
    def _work(self) -> int:
        """The sum of the blocks that this rank has begun to write, and the reports of ranks that it has received."""
        return self._blocks + sum(messages.arrivals(_FILES) for messages in {self._messages, self._node})

    def write(self, files: Mapping[str, Any]) -> None:
        """Write `files`: name -> the object for torch.save."""
        with _without_checksums, full_disk.needs(bytes_in(files)):
            for name, content in files.items():
                if not (self._folder and is_of_a_rank(name)):
                    self._write(name, content)
                elif (small := self._as_small(content)) is not None:
                    self._small[name] = small
                else:
                    self._await_folder()
                    self._write(f"{self._folder}/{name}", content)

    @property
    def written(self) -> list[str]:
        """The names of the files that this rank has written, in the partial folder."""
        return [*self._entries]

    def make_folder(self) -> None:
        """Make the partial folder; in a gang of several nodes, the first rank of each node makes that of the node."""
        if not self._folder:
            make_folders(self.staging.partial)  # every rank: whichever comes first creates it
        elif self._is_leader:
            make_folders(self.staging.partial / self._folder)
            self._node.to_all(_FOLDER, self.staging.uuid)

    def gather_entries(self) -> tuple[dict[str, FileEntry], dict[str, int]]:
        """Send this rank's entries to rank 0, which waits for all ranks; others return ({}, {}).

        Rank 0 returns the entries of all files, for the manifest, and the bytes in the folder of each node.

        Raises SaveAbandoned, and RankGone with the numbers of the ranks that exited or sent no report for SILENT_S.
        """
        if self._folder:
            self._node.to_rank_0(_SMALL, packed(self._small))
        self._report(self._entries)
        if not self._is_leader:
            return {}, {}
        try:
            of_node, _ = self._merged(self._node, range(self._node.size), SILENT_S)
        except RankGone as error:
            if not self._is_chief:
                self._messages.to_rank_0(_FAILED, [self.staging.uuid, str(error)])
            raise
        if not self._folder:
            return of_node, {}
        entries, size = self._finish_node(of_node)
        self._messages.to_rank_0(_FILES, [self.staging.uuid, _as_json(entries), {self._folder: size}])
        # Twice the limit: the first rank of a node itself waits for the ranks of its node.
        return self._merged(self._messages, self._leaders, 2 * SILENT_S) if self._is_chief else ({}, {})

    def end(self) -> None:
        """On rank 0: notify the ranks in `await_end` that the save is over, whether it was committed or failed."""
        self._tell([self.staging.uuid, True])

    def pass_on_end(self) -> None:
        """On the first rank of another node: wait until rank 0 has ended the save, and notify the ranks of the node."""
        if self._is_chief or not self._is_leader:
            return
        arrivals = self._messages.arrivals(_ENDED)

        def go_on() -> None:
            nonlocal arrivals
            self._check()
            before, arrivals = arrivals, self._messages.arrivals(_ENDED)
            if arrivals != before:
                self._tell([self.staging.uuid, False])

        self._await_end(SILENT_S, go_on)
        self.end()

    def await_end(self, still_s: float, ends_at: Callable[[], float]) -> None:
        """On another rank: wait until rank 0 has ended the save or has exited.

        Returns earlier if rank 0 reported no progress for `still_s` seconds, or at the time `ends_at()`, in seconds
        since the epoch.
        """

        def go_on() -> None:
            if time.time() > ends_at():
                raise SaveAbandoned

        self._await_end(still_s, go_on)

    def abandon(self) -> None:
        """Cancel the save, from another thread."""
        self._abandoned.set()
        for messages in {self._messages, self._node}:
            messages.wake()  # a waiting `gather_entries` then calls _go_on, which raises

    # --- helpers

    def _write(self, name: str, content: Any) -> None:
        with self.staging.file(name, self._entries, self._go_on_writing) as file:
            torch.save(content, file)  # type: ignore[arg-type]  # torch only needs `write` and `flush`

    def _as_small(self, content: Any) -> bytes | None:
        """Return the file for `content` if it is small enough to be sent to the first rank of the node."""
        if bytes_in(content) > SMALL_BYTES:
            return None
        file = BytesIO()
        torch.save(content, file)
        return file.getvalue() if file.tell() <= SMALL_BYTES else None

    def _await_folder(self) -> None:
        self._node.from_rank_0(
            _FOLDER,
            f"made its folder of checkpoint {self.staging.uuid}",
            limit_s=SILENT_S,
            is_it=lambda uuid: uuid == self.staging.uuid,
            go_on=self._check,
        )

    def _finish_node(self, entries: Mapping[str, FileEntry]) -> tuple[dict[str, FileEntry], int]:
        """Write the small files and the manifest of this node, and return the entries for rank 0 and the bytes here."""
        inside = {name: entry for name, entry in entries.items() if name.startswith(f"{self._folder}/")}
        outside = {name: entry for name, entry in entries.items() if name not in inside}
        if small := self._small_files():
            with self.staging.file(f"{self._folder}/{SMALL_FILES}", inside, self._go_on_writing) as file:
                write_archive(file, small)  # type: ignore[arg-type]  # zipfile only needs `write` and `flush`
        manifest = self.staging.finish_node(self._folder, inside)
        return {**outside, manifest_of(self._folder): manifest}, sum(entry.size for entry in inside.values())

    def _small_files(self) -> dict[str, bytes]:
        """Return the small files of all ranks of the node. They have arrived, since each rank sends them first."""
        archives = self._node.from_all(_SMALL, "sent its small files", limit_s=SILENT_S, go_on=self._go_on)
        return {name: content for archive in archives for name, content in unpacked(archive).items()}

    def _report(self, entries: Mapping[str, FileEntry] | None) -> None:
        """Send the entries of all files to the first rank of the node; None reports only that this rank is writing."""
        self._reported = time.monotonic()
        self._node.to_rank_0(_FILES, [self.staging.uuid, entries if entries is None else _as_json(entries), {}])

    def _merged(
        self, messages: GangMessages, ranks: Sequence[int], limit_s: float
    ) -> tuple[dict[str, FileEntry], dict[str, int]]:
        """Return the entries and sizes of folders that `ranks` have sent, as soon as all of them have."""
        uuid = self.staging.uuid
        reports = messages.from_all(
            _FILES,
            f"reported its files of checkpoint {uuid}",
            limit_s=limit_s,
            is_it=lambda report: report[0] == uuid and report[1] is not None,
            go_on=self._go_on,
            ranks=ranks,
        )
        entries = {name: FileEntry(**entry) for _, entries, _ in reports for name, entry in entries.items()}
        return entries, {folder: size for _, _, sizes in reports for folder, size in sizes.items()}

    def _await_end(self, limit_s: float, go_on: Callable[[], None]) -> None:
        with suppress(RankGone, SaveAbandoned):
            (self._messages if self._is_leader else self._node).from_rank_0(
                _ENDED,
                f"committed checkpoint {self.staging.uuid}",
                limit_s=limit_s,
                is_it=lambda report: report == [self.staging.uuid, True],
                go_on=go_on,
            )

    def _go_on_writing(self) -> None:
        """Count a block and report progress, before the block is written. Raises SaveAbandoned after `abandon`."""
        self._blocks += 1
        self._go_on()
        if time.monotonic() - self._reported > REPORT_S:
            self._report(None)

    def _go_on(self) -> None:
        self._check()
        if self._is_chief:
            for uuid, problem in [*self._messages.latest(_FAILED).values()]:
                if uuid == self.staging.uuid:
                    raise RankGone(problem)
        if self._is_leader:
            self._relay()

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise SaveAbandoned

    def _relay(self) -> None:
        """Report progress to rank 0 and to the ranks of the node, at most every REPORT_S seconds."""
        now, work = time.monotonic(), self._work
        if work == self._relayed_work or now - self._relayed <= REPORT_S:
            return
        self._relayed, self._relayed_work = now, work
        if not self._is_chief:
            self._messages.to_rank_0(_FILES, [self.staging.uuid, None, {}])
        self._tell([self.staging.uuid, False])

    def _tell(self, report: list[Any]) -> None:
        """Send to the ranks of the node; from rank 0 also to the first rank of each other node, which passes it on."""
        if self._is_chief and self._node is not self._messages:
            self._messages.to_ranks(self._leaders[1:], _ENDED, report)
        self._node.to_all(_ENDED, report)


def _as_json(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    return {name: asdict(entry) for name, entry in entries.items()}


class BackgroundTask:
    """A function that runs in a thread while training continues."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def join_while_progressing(self, progress: Callable[[], int], still_s: float, ends_at: Callable[[], float]) -> None:
        """Wait until the task is done, `progress()` has not changed for `still_s` seconds, or `ends_at()` has passed.

        `ends_at` returns a time in seconds since the epoch; it is called repeatedly, since the time may change.
        """
        clock, before = AwakeClock(LOOK_S), progress()  # an AwakeClock: a suspended job makes no progress
        while not self.is_done and time.time() < ends_at():
            self.join(LOOK_S)
            waited_s = clock.seconds()  # before progress(), so that progress in between restarts the clock
            if (now := progress()) != before:
                clock, before = AwakeClock(LOOK_S), now
            elif waited_s >= still_s:
                return

    def check(self) -> None:
        """Raise the exception that ended the task, if any."""
        if self._error:
            raise self._error

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except SaveAbandoned:  # cancelled on purpose: not a failure
            pass
        except BaseException as error:
            self._error = error


def bytes_in(content: Any) -> int:
    """Return the size of all tensors in `content`, in bytes."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(map(bytes_in, content.values()))
    return sum(map(bytes_in, content)) if isinstance(content, (list, tuple)) else 0


class WithoutChecksums:
    """Keeps torch.save from computing CRC-32s for its zip archive, which torch.load never verifies, in a `with` block.

    torch has one option for the whole process. Blocks of several threads may overlap: the last one restores it.
    """

    def __init__(self) -> None:
        self._lock, self._blocks, self._before = Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._before = get_crc32_options()
                set_crc32_options(False)
            self._blocks += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                set_crc32_options(self._before)


_without_checksums = WithoutChecksums()
