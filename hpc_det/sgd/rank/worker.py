"""A rank's process: connects to the driver, joins the gang, and runs the methods that the driver requests.

driver -> rank: {"do": METHOD, "id"} with a cloudpickle of the arguments, where METHOD is `begin`, `call`, `change`,
`snapshot` or `loop`; {"do": "progress"}, {"do": "stacks"}, {"do": "leave"}; answers to store requests;
{"do": "heard"} in answer to a report.

rank -> driver: {"done": id} with a cloudpickle of the result, or {"raised": id} with a pickle of the fields of Raised
after the first; {"progress": ...} in answer to "progress" and "stacks", in the latter case with "at";
{"shown": STREAM} with text that rank 0 printed; store requests (hpc_det.sgd.rank.store); {"report": ...} from a
training loop of `fit`.
"""

from __future__ import annotations

import faulthandler
import io
import mmap
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hpc_det.checkpoint.torch_layout import is_supported, layout_of
from hpc_det.distributed.collectives import closed_once_connected
from hpc_det.distributed.rank_process import log_to
from hpc_det.node.forking import leave, prepare_to_compute
from hpc_det.node.frames import Message
from hpc_det.node.heartbeat import Phase, Progress, place_of_main_thread
from hpc_det.node.key import derived
from hpc_det.node.lines import connect
from hpc_det.node.network import variables
from hpc_det.node.process import STOP_SIGNALS
from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.runner import Runner
from hpc_det.sgd.rank.state import pickled
from hpc_det.sgd.rank.store import LineStore

CONNECT_S, STORE_S = 30.0, 300.0
"""Seconds to wait for a connection to the driver, and for an answer of its store."""

_PHASES: dict[str, Phase] = {"train": "training", "validate": "validation"}
"""Phases of the Runner's methods for the hang detector; the phase of all other methods is "function"."""

_STDERR = 2  # faulthandler needs a file descriptor: sys.stderr may have been replaced

_BATCHES_BITS = 32
"""Bits of a progress count that hold the batches; the bits above hold the borders."""

_ROOM = 2**20
"""Bytes by which a state may grow before its buffer has to be mapped into memory again."""


@dataclass(frozen=True)
class Start:
    """The argument of `begin`."""

    pickled: bytes
    """A pickle of RankSettings and of the initialization hook or None; the same for all ranks."""
    snapshot: int | Path | None
    """The snapshot that rank 0 reads: the number of a buffer of its node, or a file; None: training starts afresh."""
    leaves_after_error: bool
    """Whether this rank exits after an exception, so that its peers' collectives fail.

    True if rank 0 is in the driver's process (use_local): the driver reads no messages while rank 0 computes, so only
    a broken collective on rank 0 lets it notice an exception on another rank.
    """
    own: bytes | None
    """This rank's own part of the snapshot, pickled; None if the rank did not exist then."""
    modules: tuple[str, ...]
    """The driver's sys.path as absolute folders: pickles refer to the user's modules by name."""


class Own(NamedTuple):
    """The part of a snapshot that only one rank has."""

    state: bytes
    """A pickle of Runner.own()."""
    epochs_done: int
    """Completed passes over the training data."""


class RankWorker:
    """One rank, connected to the driver.

    A rank process runs `serve`. For rank 0 in the driver's process (use_local), the driver calls `serve_one` after each
    request.
    """

    def __init__(self, order: dict[str, Any], on_end: Callable[[], None] = lambda: None) -> None:
        """Connect to the driver. `order`: the keys are those of `run`; `log` and `interface` are not needed.

        `on_end` is called, by another thread, when the connection to the driver has ended.
        """
        self._place = RankPlace(order["rank"], order["local_rank"], order["size"])
        self._buffers = Buffers(order["buffers"])
        self._key = bytes.fromhex(order["key"])
        self._runner: Runner | None = None
        self._phase: Phase = "outside"
        self._borders = 0
        """Number of borders passed: ends of phases, and reports of a loop. All ranks pass the same borders."""
        self._began_at = (0, 0)
        """Borders and batches when the current phase began."""
        self._leaves_after_error = False
        self._on_end = on_end
        generation = order["generation"]
        identity = {"role": "rank", "rank": self._place.rank, "generation": generation, "pid": os.getpid()}
        host, port = order["driver"]
        self.line = connect(host, port, self._key, identity, CONNECT_S, listener="the driver")
        self._store = LineStore(self.line, STORE_S)
        self._orders: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="driver's line", daemon=True)
        self._listener.start()

    def serve(self) -> None:
        """Run requests until the driver asks this rank to leave or the connection ends."""
        while self.serve_one():
            pass

    def serve_one(self) -> bool:
        """Wait for a request, run it, and send the result. Return False if it was the last one."""
        order = self._orders.get()
        if order is None or order.head["do"] == "leave":
            return False
        head, body = self._answer(order)
        self.line.send(head, body)
        return "done" in head or not self._leaves_after_error

    def close(self) -> None:
        """Leave the process group and close the connection."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.line.close()
        self._listener.join()

    def _answer(self, order: Message) -> tuple[dict[str, Any], bytes]:
        """Run the request; return head and body of the message with its result or its exception."""
        number = order.head["id"]
        try:
            arguments = cloudpickle.loads(order.body)
            result = getattr(self, order.head["do"])(*arguments)  # the line is authenticated: only the driver sends
            return {"done": number}, cloudpickle.dumps(result)
        except KeyboardInterrupt:  # with use_local this is the user's Ctrl-C in the driver
            raise
        except BaseException as error:
            return {"raised": number}, pickle.dumps(_raised_fields(error))

    def begin(self, start: Start) -> None:
        """Call the initialization hook, join the gang, create the operator, and restore the snapshot, if any."""
        with self._in("setup"):
            self._begin(start)

    def _begin(self, start: Start) -> None:
        # In this order: the hook may set variables that NCCL reads, and `setup` may call collectives.
        sys.path += [folder for folder in start.modules if folder not in sys.path]
        self._leaves_after_error = start.leaves_after_error
        settings, hook = cloudpickle.loads(start.pickled)
        if hook:
            hook()
        if settings.use_gpu:
            torch.cuda.set_device(self._place.local_rank)
        if self._place.is_distributed:
            self._join(settings)
        self._runner = Runner(settings, self._place, derived(self._key, "objects"))
        if start.snapshot is not None:
            shared = self._read(start.snapshot) if self._place.rank == 0 else None
            self._runner.restore(shared, pickle.loads(start.own) if start.own else None)

    def call(self, method: str, arguments: dict[str, Any], only: int | None = None) -> Any:
        """Call a method of the Runner and return its result. With `only`, all ranks but that one just return None."""
        with self._in(_PHASES.get(method, "function")):
            return getattr(self.runner, method)(**arguments) if only in (None, self._place.rank) else None

    def change(
        self, method: str, arguments: dict[str, Any], buffer: int, holders: list[int]
    ) -> tuple[dict[str, Any], Own]:
        """Call a method of the Runner and take a snapshot; return the method's result and this rank's part of it."""
        # One request for both: if a rank dies in between, the driver has neither the result nor the snapshot.
        return self.call(method, arguments), self.snapshot(buffer, holders)

    def loop(self, function: Callable[[RankWorker], None]) -> None:
        """Run the training loop of `fit`, which may call `tell`."""
        with self._in("loop"):
            function(self)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        """Mark the code in the `with` block as a phase, for the hang detector."""
        # A rank that has left the phase must count as further ahead than peers that are still in it, so its end is a
        # border.
        self._began_at, self._phase = (self._borders, self._batches), phase
        try:
            yield
        finally:
            self._borders, self._phase = self._borders + 1, "outside"

    def tell(self, head: dict[str, Any]) -> None:
        """Send a report in the middle of a call, and wait until the driver has received the reports of all ranks.

        Raises SystemExit if the driver ends this rank instead.
        """
        self._borders += 1
        self.line.send(head)
        answer = self._orders.get()
        if answer is None or answer.head["do"] != "heard":
            raise SystemExit("the driver ends this rank")

    def snapshot(self, buffer: int, holders: list[int]) -> Own:
        """Take a snapshot, and return this rank's own part. Collective.

        The ranks in `holders` write the shared part to the buffer with this number on their nodes.
        """
        self.runner.level()
        if self._place.rank in holders:
            self._buffers.write(buffer, self.runner.shared())
        return Own(pickled(self.runner.own()), self.runner.epochs_done)

    @property
    def runner(self) -> Runner:
        """The runner. Raises RuntimeError before `begin`."""
        if self._runner is None:
            raise RuntimeError("this rank has no operator yet: `begin` was not called")
        return self._runner

    def _join(self, settings: RankSettings) -> None:
        # With NCCL for GPUs, gloo is needed too: snapshots exchange tensors on the CPU.
        with closed_once_connected():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if settings.backend == "nccl" else "gloo",
                store=PrefixStore("gang", self._store),
                rank=self._place.rank,
                world_size=self._place.size,
                timeout=timedelta(seconds=settings.timeout_s),
            )

    def _read(self, snapshot: int | Path) -> dict[str, Any]:
        """Return the shared part of a snapshot, from a buffer of this node or from a file."""
        # weights_only=False is safe: ranks of this run have written the buffer, and the driver has checked the seal of
        # the file.
        path = snapshot if isinstance(snapshot, Path) else self._buffers.path(snapshot)
        shared: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        return shared

    def _listen(self) -> None:
        """Read messages in a separate thread, so that a rank that computes still answers the hang detector."""
        while (message := self.line.receive()) is not None:
            if "store" in message.head:
                self._store.hear(message)
            elif message.head["do"] == "progress":
                self.line.send({"progress": self._progress()})
            elif message.head["do"] == "stacks":
                faulthandler.dump_traceback(file=_STDERR, all_threads=True)
                self.line.send({"at": place_of_main_thread(), "progress": self._progress()})
            else:
                self._orders.put(message)
        self._orders.put(None)
        self._on_end()

    @property
    def _batches(self) -> int:
        return self._runner.batches if self._runner else 0

    def _progress(self) -> Progress:
        """Return this rank's progress. Its count grows with the borders that the rank has passed, then with batches."""
        phase, (borders_before, batches_before) = self._phase, self._began_at
        batch = self._batches - batches_before
        # "warm": the phase has come past its start, where compiling, loading data or a slow setup may take long
        is_warm = phase != "outside" and (batch > 0 or self._borders > borders_before)
        return Progress(phase, (self._borders << _BATCHES_BITS) + batch, warm=is_warm, batch=batch)


class Buffers:
    """The node's buffers for snapshots: anonymous memory that other processes read as files."""

    def __init__(self, descriptors: list[int]) -> None:
        """`descriptors`: file descriptors of the buffers (hpc_det.checkpoint.snapshots), by number."""
        self._descriptors = descriptors
        self._mapped: dict[int, torch.Tensor] = {}

    def path(self, number: int) -> str:
        """Return the path under which this process can open the buffer, for torch.load."""
        return f"/proc/self/fd/{self._descriptors[number]}"

    def write(self, number: int, content: Any) -> None:
        """Write the content in the format of torch.save; the process that writes it to disk adds the seal."""
        try:
            file = layout_of(content) if is_supported() else None
        except RuntimeError:  # layout_of does not support all kinds of tensors
            file = None
        if file:
            file.fill(self._memory(number, file.size))
        else:
            self._save(number, content)

    def _save(self, number: int, content: Any) -> None:
        with open(self.path(number), "r+b") as file:
            torch.save(content, file)
            file.truncate()

    def _memory(self, number: int, size: int) -> torch.Tensor:
        """Return memory of at least `size` bytes; the buffer, read as a file, has exactly `size` bytes."""
        descriptor = self._descriptors[number]
        if number not in self._mapped or len(self._mapped[number]) < size:
            # With room, so that a slightly larger state needs no new mapping.
            os.ftruncate(descriptor, size + _ROOM)
            mapped = mmap.mmap(descriptor, size + _ROOM)
            self._mapped[number] = torch.frombuffer(mapped, dtype=torch.uint8)
        os.ftruncate(descriptor, size)
        return self._mapped[number]


def _raised_fields(error: BaseException) -> tuple[str, str, bytes]:
    """Return the fields of Raised after the first: the message, the traceback, and the pickled exception."""
    return _words(error), "".join(traceback.format_exception(error)), _pickled(error)


def _words(error: BaseException) -> str:
    """Return type and message of an exception, even if its `str()` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as problem:
        return f"{type(error).__name__}, whose str() raises {type(problem).__name__}"


def _pickled(error: BaseException) -> bytes:
    """Return the pickled exception; empty if it cannot be pickled."""
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        return b""


Send = Callable[[dict[str, str], bytes], None]


# --- the rank's process, as the fork server starts it: signals, exit, output


def run(order: dict[str, Any]) -> int:
    """Run the rank that `order` describes, and return the exit code.

    Keys of `order`: rank, local_rank, size, generation, driver (host and port), key (hexadecimal), buffers (file
    descriptors), log (a path), interface (name of the network interface, or None).
    """
    log_to(Path(order["log"]))
    _ignore_stops()
    os.environ.update(_variables(order))
    prepare_to_compute()
    # Without the driver, the rank exits at once, even if its main thread is in a collective.
    worker = RankWorker(order, on_end=lambda: leave(1))
    if order["rank"] == 0:
        show_too(worker.line.send)
    worker.serve()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _ignore_stops() -> None:
    """Ignore stop signals in this process, but not in processes that it forks, such as DataLoader workers."""
    # The node agent receives them as well, and reports to the driver that the node will be taken away. The ranks must
    # not end before the driver has decided what they do.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=_restore_stops)


def _restore_stops() -> None:
    """Restore the default actions of stop signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _variables(order: dict[str, Any]) -> dict[str, str]:
    """Return environment variables: torchrun's, which libraries read, and those for the interface of gloo and NCCL."""
    numbers = {"RANK": order["rank"], "WORLD_SIZE": order["size"], "LOCAL_RANK": order["local_rank"]}
    return {name: str(number) for name, number in numbers.items()} | (
        variables(order["interface"]) if order["interface"] else {}
    )


# --- the output of rank 0, which the driver prints too: progress bars, and what users' operators print


def show_too(send: Send) -> None:
    """Send everything that this process writes to sys.stdout and sys.stderr to the driver too."""
    sys.stdout = _Shown(sys.stdout, "stdout", send)
    sys.stderr = _Shown(sys.stderr, "stderr", send)


def show(stream: str, text: bytes | bytearray) -> None:
    """Print text of rank 0 in the driver. `stream`: "stdout" or "stderr"."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    encoding = file.encoding or "utf-8"
    # The driver's terminal may lack characters that rank 0 could print.
    file.write(text.decode().encode(encoding, "replace").decode(encoding))
    file.flush()


class _Shown(io.TextIOBase):
    """A text stream that writes to the rank's log and to the driver."""

    def __init__(self, log: TextIO, stream: str, send: Send) -> None:
        self._log = log
        self._stream = stream
        self._send = send
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() == self._pid:  # not in a forked child, such as a DataLoader worker: it must not use the line
            self._send({"shown": self._stream}, text.encode(errors="replace"))
        return self._log.write(text)

    def flush(self) -> None:
        self._log.flush()

    def fileno(self) -> int:
        return self._log.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # tqdm reads it to choose the characters of its bars
        return self._log.encoding
