"""One save of a checkpoint: the part of each rank, in the training thread or in a background thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from threading import Event, Thread
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from hpc_det.checkpoint.sealed_files import SaveAbandoned
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.checkpoint.staging import Staging
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_messages import GangMessages, RankGone
from hpc_det.node import full_disk
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
        with _without_second_checksum(), full_disk.needs(bytes_in(files)):
            for name, content in files.items():
                with self.staging.file(name, self._entries, self._go_on_writing) as file:
                    torch.save(content, file)  # type: ignore[arg-type]  # torch only needs `write` and `flush`

    def gather_entries(self) -> dict[str, FileEntry]:
        """Send this rank's entries to rank 0, which waits for all ranks and returns all entries; others return {}.

        Raises SaveAbandoned, and RankGone with the numbers of the ranks that exited or sent no report for SILENT_S.
        """
        self._report(self._entries)
        if not self._is_leader:
            return {}
        try:
            of_node = self._merged(self._node, range(self._node.size))
        except RankGone as error:
            if not self._is_chief:
                self._messages.to_rank_0(_FAILED, [self.staging.uuid, str(error)])
            raise
        if self._node is self._messages:
            return of_node
        self._messages.to_rank_0(_FILES, [self.staging.uuid, _as_json(of_node)])
        return self._merged(self._messages, self._leaders) if self._is_chief else {}

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

    def _report(self, entries: Mapping[str, FileEntry] | None) -> None:
        """Send the entries of all files to the first rank of the node; None reports only that this rank is writing."""
        self._reported = time.monotonic()
        self._node.to_rank_0(_FILES, [self.staging.uuid, entries if entries is None else _as_json(entries)])

    def _merged(self, messages: GangMessages, ranks: Sequence[int]) -> dict[str, FileEntry]:
        """Return the entries that `ranks` have sent, as soon as all of them have."""
        uuid = self.staging.uuid
        reports = messages.from_all(
            _FILES,
            f"reported its files of checkpoint {uuid}",
            limit_s=SILENT_S,
            is_it=lambda report: report[0] == uuid and report[1] is not None,
            go_on=self._go_on,
            ranks=ranks,
        )
        return {name: FileEntry(**entry) for _, entries in reports for name, entry in entries.items()}

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
            self._messages.to_rank_0(_FILES, [self.staging.uuid, None])
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


@contextmanager
def _without_second_checksum() -> Iterator[None]:
    """Keep torch.save from computing CRC-32s for its zip archive in this block; torch.load never verifies them."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
