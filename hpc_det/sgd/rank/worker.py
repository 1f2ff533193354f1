"""A rank: joins its gang when the driver says so, and then calls what the driver names.

driver -> rank: {"do": METHOD, "id"} with a cloudpickle of the arguments, where METHOD is `begin`, `call`, `change`,
`snapshot` or `loop`; {"do": "progress"}, {"do": "stacks"}, {"do": "leave"}; rank -> driver: {"done": id} with a
cloudpickle of the result, or {"raised": id} with a pickle of the rest of a Raised, {"progress": ...}, with "at" where
stacks were asked for, {"shown": STREAM} with the text, the store's questions (hpc_det.sgd.rank.store), and from a loop
of `fit` {"report": ...}, for which the answer is {"do": "heard"}.
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
from torch._C._distributed_c10d import PrefixStore

from hpc_det.checkpoint.torch_layout import layout_of
from hpc_det.distributed.collectives import closed_once_connected
from hpc_det.distributed.rank_process import leave, log_to
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

_PHASES: dict[str, Phase] = {"train": "training", "validate": "validation"}

_STDERR = 2

_BATCHES_BITS = 32

_ROOM = 2**20
"""Bytes by which a state may grow before its buffer is mapped anew."""


@dataclass(frozen=True)
class Start:
    """What `begin` is told."""

    pickled: bytes
    """RankSettings, and the initialization hook or None: the same for all ranks."""
    snapshot: int | Path | None
    """Where rank 0 finds one: the number of its node's buffer, or a file. None: the training begins."""
    leaves_after_error: bool
    """Rank 0 is in the driver's process, which hears of an error on another rank no sooner than gloo tells rank 0."""
    own: bytes | None
    """What this rank alone had then; None where it did not exist."""
    modules: tuple[str, ...]
    """Folders where the driver finds modules: what is pickled names the user's by their names."""


class Own(NamedTuple):
    """Of one rank, at a snapshot."""

    state: bytes
    epochs_done: int


class RankWorker:
    """One rank. `serve` is its life; for the one in the driver (use_local) `serve_one` is called when it was asked."""

    def __init__(self, order: dict[str, Any], on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called by another thread when the driver is gone."""
        self._place = RankPlace(order["rank"], order["local_rank"], order["size"])
        self._buffers = Buffers(order["buffers"])
        self._key = bytes.fromhex(order["key"])
        self._runner: Runner | None = None
        self._phase: Phase = "outside"
        self._borders = 0
        """That all ranks pass: ends of phases, and what a loop tells on its way."""
        self._began_at = (0, 0)
        """Borders and batches, when the phase began."""
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
        """Until the driver says so."""
        while self.serve_one():
            pass

    def serve_one(self) -> bool:
        """Wait for an order and answer it; False at the last one."""
        order = self._orders.get()
        if order is None or order.head["do"] == "leave":
            return False
        head, body = self._answer(order)
        self.line.send(head, body)
        return "done" in head or not self._leaves_after_error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self.line.close()
        self._listener.join()

    def _answer(self, order: Message) -> tuple[dict[str, Any], bytes]:
        """What the order brought, or what was raised instead, as it is sent."""
        number = order.head["id"]
        try:
            arguments = cloudpickle.loads(order.body)
            result = getattr(self, order.head["do"])(*arguments)
            return {"done": number}, cloudpickle.dumps(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return {"raised": number}, pickle.dumps(_told(error))

    def begin(self, start: Start) -> None:
        """Join the gang; the user's components; what they were when the snapshot was taken."""
        with self._in("setup"):
            self._begin(start)

    def _begin(self, start: Start) -> None:
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
        """A method of the Runner; None on other ranks than the `only` one."""
        with self._in(_PHASES.get(method, "function")):
            return getattr(self.runner, method)(**arguments) if only in (None, self._place.rank) else None

    def change(
        self, method: str, arguments: dict[str, Any], buffer: int, holders: list[int]
    ) -> tuple[dict[str, Any], Own]:
        """A method of the Runner, and at once a snapshot of what came of it: one counts only with the other."""
        return self.call(method, arguments), self.snapshot(buffer, holders)

    def loop(self, function: Callable[[RankWorker], None]) -> None:
        """What `fit` runs; it may `tell` the driver things on its way."""
        with self._in("loop"):
            function(self)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        """Peers that still are in it are behind this rank once it has left."""
        self._began_at, self._phase = (self._borders, self._batches), phase
        try:
            yield
        finally:
            self._borders, self._phase = self._borders + 1, "outside"

    def tell(self, head: dict[str, Any]) -> None:
        """In the middle of a call, and wait until the driver has heard all ranks."""
        self._borders += 1
        self.line.send(head)
        answer = self._orders.get()
        if answer is None or answer.head["do"] != "heard":
            raise SystemExit("the driver ends this rank")

    def snapshot(self, buffer: int, holders: list[int]) -> Own:
        """What is the same on all ranks goes into memory of the nodes of some of them."""
        self.runner.level()
        if self._place.rank in holders:
            self._buffers.write(buffer, self.runner.shared())
        return Own(pickled(self.runner.own()), self.runner.epochs_done)

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("this rank has not begun")
        return self._runner

    def _join(self, settings: RankSettings) -> None:
        with closed_once_connected():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if settings.backend == "nccl" else "gloo",
                store=PrefixStore("gang", self._store),
                rank=self._place.rank,
                world_size=self._place.size,
                timeout=timedelta(seconds=settings.timeout_s),
            )

    def _read(self, snapshot: int | Path) -> dict[str, Any]:
        """Both are the run's own: this node's memory, or a file whose seal the driver has checked."""
        path = snapshot if isinstance(snapshot, Path) else self._buffers.path(snapshot)
        shared: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        return shared

    def _listen(self) -> None:
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
        """Of two ranks at the same border, the one with fewer batches of this phase is behind."""
        phase, (borders_before, batches_before) = self._phase, self._began_at
        batch = self._batches - batches_before
        is_warm = phase != "outside" and (batch > 0 or self._borders > borders_before)
        return Progress(phase, (self._borders << _BATCHES_BITS) + batch, warm=is_warm, batch=batch)


class Buffers:
    def __init__(self, descriptors: list[int]) -> None:
        """Of anonymous memory (hpc_det.checkpoint.snapshots), which other processes read as files."""
        self._descriptors = descriptors
        self._mapped: dict[int, torch.Tensor] = {}

    def path(self, number: int) -> str:
        """What torch.load reads."""
        return f"/proc/self/fd/{self._descriptors[number]}"

    def write(self, number: int, content: Any) -> None:
        """As a file of torch.save's. Seals are the business of whoever makes it durable."""
        try:
            file = layout_of(content)
        except RuntimeError:  # of tensors that cannot be laid out
            self._save(number, content)
        else:
            file.fill(self._memory(number, file.size))

    def _save(self, number: int, content: Any) -> None:
        with open(self.path(number), "r+b") as file:
            torch.save(content, file)
            file.truncate()

    def _memory(self, number: int, size: int) -> torch.Tensor:
        """At least `size` bytes; the buffer, as a file, has just so many."""
        descriptor = self._descriptors[number]
        if number not in self._mapped or len(self._mapped[number]) < size:
            os.ftruncate(descriptor, size + _ROOM)
            mapped = mmap.mmap(descriptor, size + _ROOM)
            self._mapped[number] = torch.frombuffer(mapped, dtype=torch.uint8)
        os.ftruncate(descriptor, size)
        return self._mapped[number]


def _told(error: BaseException) -> tuple[str, str, bytes]:
    """What a Raised holds besides the rank."""
    return _words(error), "".join(traceback.format_exception(error)), _pickled(error)


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as problem:
        return f"{type(error).__name__}, whose str() raises {type(problem).__name__}"


def _pickled(error: BaseException) -> bytes:
    """Nothing where it cannot be: its words are enough."""
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        return b""


Send = Callable[[dict[str, str], bytes], None]


# --- its process, as the fork server starts it: which signals it takes, how it ends, and what it prints


def run(order: dict[str, Any]) -> int:
    """Be the rank that `order` describes. Returns the exit code."""
    log_to(Path(order["log"]))
    _ignore_stops()
    os.environ.update(_variables(order))
    worker = RankWorker(order, on_end=lambda: leave(1))
    if order["rank"] == 0:
        show_too(worker.line.send)
    worker.serve()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _ignore_stops() -> None:
    """They are the agent's business; a DataLoader's worker has the defaults again."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=_hear_stops)


def _hear_stops() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _variables(order: dict[str, Any]) -> dict[str, str]:
    """torchrun's, for libraries that ask who they are; and which interface gloo and NCCL shall take."""
    numbers = {"RANK": order["rank"], "WORLD_SIZE": order["size"], "LOCAL_RANK": order["local_rank"]}
    return {name: str(number) for name, number in numbers.items()} | (
        variables(order["interface"]) if order["interface"] else {}
    )


# --- what rank 0 prints, also on the driver's screen: progress bars, and the output of users' operators


def show_too(send: Send) -> None:
    """From now on all that this process writes by Python's streams is also sent."""
    sys.stdout = _Shown(sys.stdout, "stdout", send)
    sys.stderr = _Shown(sys.stderr, "stderr", send)


def show(stream: str, text: bytes | bytearray) -> None:
    """The driver's part. Its terminal may know fewer signs."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    encoding = file.encoding or "utf-8"
    file.write(text.decode().encode(encoding, "replace").decode(encoding))
    file.flush()


class _Shown(io.TextIOBase):
    def __init__(self, log: TextIO, stream: str, send: Send) -> None:
        self._log = log
        self._stream = stream
        self._send = send
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() == self._pid:  # not in a forked child, a DataLoader's worker: the line is this process's
            self._send({"shown": self._stream}, text.encode(errors="replace"))
        return self._log.write(text)

    def flush(self) -> None:
        self._log.flush()

    def fileno(self) -> int:
        return self._log.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # progress bars ask which signs they may draw
        return self._log.encoding
