"""The gang as one rank sees it: rank numbers and collectives.

The loop's own collectives carry JSON in tensors; a trial's collectives carry any object, authenticated (see
hpc_det.distributed.sealed). torch's object collectives would unpickle any bytes that arrive from the network.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_det.distributed.gang_messages import GangMessages, open_messages
from hpc_det.distributed.gang_store import gang_store, keep_to_this_node
from hpc_det.distributed.node_messages import open_node_messages
from hpc_det.distributed.sealed import Alone, SealedGroup, shared_secret
from hpc_det.errors import UsageError
from hpc_det.node.network import limit_look_ups

ON_RANK_0_S = 24 * 3600.0
"""Seconds for which the other ranks wait for work that rank 0 does alone, such as evaluating the full dataset."""


_PACKET_BYTES = 1024
"""Bytes of the first message of `broadcast_json`: the length, and the content if it fits."""


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """A rank's numbers in its gang and its collectives. With one rank, every method works without a process group."""

    rank: int = 0
    """Number of this rank in the gang, from 0."""
    size: int = 1
    """Number of ranks in the gang."""
    local_rank: int = 0
    """Number of this rank on its node, from 0."""
    local_size: int = 1
    """Number of ranks on this node."""
    nodes: int = 1
    """Number of nodes."""
    env: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Environment from which the secret that the ranks share, GPU visibility and the slot type are read.

    The secret is read at the first collective on objects.
    """

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Distributed:
        """Return the numbers in torchrun's environment variables; one rank if none of them is set."""
        size, local_size = int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_WORLD_SIZE", 1))
        return cls(
            rank=int(env.get("RANK", 0)),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", 0)),
            local_size=local_size,
            nodes=size // local_size,
            env=env,
        )

    def get_rank(self) -> int:
        return self.rank

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_size(self) -> int:
        return self.size

    def get_num_agents(self) -> int:
        """Return the number of nodes."""
        return self.nodes

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The GPU of this rank, or the CPU if torch has no GPU."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def start(self) -> None:
        """Join the process group: gloo for CPU tensors, and nccl if there are GPUs. Then connect to rank 0.

        A process group that exists already is used; beside one without a backend for CPU tensors, such as NCCL alone,
        gloo connects the ranks. Raises UsageError if the node has no GPU for this rank.
        """
        self._check_gpu()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1 and not dist.is_initialized():
            limit_look_ups(os.environ)  # before the first look-up: the resolver reads its options once per process
            if self.nodes == 1:
                keep_to_this_node(os.environ)
            store = gang_store(self.rank, self.size, self.nodes, os.environ)
            with closed_once_connected():
                # Without `device_id`. With it, a later group of some ranks on gloo hangs, as Megatron makes them: ranks
                # outside of the group split NCCL's communicator, a collective that the ranks in the group do not join
                # (torch's _new_process_group_helper, pytorch issue 145376). And NCCL would connect in this block, which
                # closes its ports. No barrier follows: torch makes none unless TORCH_DIST_INIT_BARRIER=1.
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                    store=store,
                    rank=self.rank,
                    world_size=self.size,
                )
        _ = self.node_messages  # opens the connections now, on every rank: opening them is a collective

    def _check_gpu(self) -> None:
        """Raise UsageError if this rank has no GPU to itself."""
        # NCCL refuses two ranks on one GPU too, but with a different error message on each rank.
        count, host = torch.cuda.device_count(), socket.gethostname()
        if count and self.local_rank >= count:
            raise UsageError(
                f"rank {self.rank} has local rank {self.local_rank} of {self.local_size} on {host}, where torch "
                f"sees {_gpus(count, self.env)}; each rank uses the GPU with the number of its local rank, so start no "
                f"more ranks on a node than it has GPUs (slots_per_node of the cluster profile), and let each rank see "
                f"all of them"
            )
        if count or self.env.get("HPC_DET_SLOT_TYPE") != "gpu":
            return
        if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise UsageError(
                f"slots are GPUs (slot_type of the cluster profile), but on {host} torch sees "
                f"{_gpus(count, self.env)}; check nvidia-smi on that node, or set slot_type: cpu"
            )
        print(f"hpc-det: slots are GPUs, which torch {torch.__version__} cannot use: training on the CPU", flush=True)

    def leave(self) -> None:
        """Close the connections of `messages` and `node_messages`; the process group remains."""
        for name in ("node_messages", "messages"):
            if messages := vars(self).pop(name, None):
                messages.close()

    def stop(self) -> None:
        """Close the connection to rank 0 and destroy the process group, if there is one."""
        self.leave()
        for objects in ("_gang", "_node", "_on_cpu"):
            vars(self).pop(objects, None)  # these hold process groups, whose destructors must not run later
        if dist.is_initialized():  # also with one rank: DeepSpeed needs a process group even then
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until all ranks have called this. Collective."""
        self.sum(torch.zeros(1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum of a CPU tensor over all ranks; `values` is overwritten with it."""
        if self.size > 1:
            dist.all_reduce(values, group=self._on_cpu)
        return values

    def gather_json(self, data: Any) -> list[Any]:
        """Return the `data` of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [data]
        own = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]), group=self._on_cpu)
        longest = int(max(lengths))  # all_gather takes tensors of one size, so all are padded to the longest
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self._on_cpu)
        return [json.loads(bytes(item[: int(length)].numpy())) for item, length in zip(received, lengths, strict=True)]

    def broadcast_json(self, data: Any) -> Any:
        """Return the `data` of rank 0 on every rank; the `data` of other ranks is not used."""
        if self.size == 1:
            return data
        # Not a gather: a broadcast costs each rank the same, whatever the number of ranks.
        content = json.dumps(data if self.is_chief else None).encode()
        beginning = self._broadcast(len(content).to_bytes(8, "big") + content[: _PACKET_BYTES - 8], _PACKET_BYTES)
        length, received = int.from_bytes(beginning[:8], "big"), beginning[8:]
        if length > len(received):
            received += self._broadcast(content[len(received) :], length - len(received))
        return json.loads(received[:length])

    def _broadcast(self, content: bytes, size: int) -> bytes:
        """Return the `content` of rank 0 on every rank, padded to `size` bytes."""
        tensor = torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=self._on_cpu)
        return tensor.numpy().tobytes()

    # --- any object that pickle takes

    def gather(self, data: Any) -> list[Any] | None:
        """Return the `data` of every rank, in rank order, on rank 0; None on the others.

        This and the following methods raise HpcDetError for data that was not sent by a rank of this run, before
        unpickling it, and if the ranks share no secret (see `shared_secret`).
        """
        return self._gang.gather(data)

    def allgather(self, data: Any) -> list[Any]:
        """Return the `data` of every rank, in rank order, on every rank."""
        return self._gang.allgather(data)

    def broadcast(self, data: Any) -> Any:
        """Return the `data` of rank 0 on every rank."""
        return self._gang.broadcast(data)

    def gather_local(self, data: Any) -> list[Any] | None:
        """Return the `data` of every rank of this node on local rank 0; None on the others."""
        return self._node.gather(data)

    def allgather_local(self, data: Any) -> list[Any]:
        """Return the `data` of every rank of this node, in rank order, on each of them."""
        return self._node.allgather(data)

    def broadcast_local(self, data: Any) -> Any:
        """Return the `data` of local rank 0 on every rank of this node."""
        return self._node.broadcast(data)

    @cached_property
    def _gang(self) -> Alone | SealedGroup:
        if self.size == 1:
            return Alone()
        return SealedGroup(range(self.size), self.rank, shared_secret(self.env), self._on_cpu)

    @cached_property
    def _node(self) -> Alone | SealedGroup:
        if self.nodes == 1:
            return self._gang
        if self.local_size == 1:
            return Alone()
        first = self.rank - self.local_rank
        ranks = range(first, first + self.local_size)
        # with use_local_synchronization only the ranks of this node have to take part in making the group
        with closed_once_connected():
            group = dist.new_group([*ranks], backend="gloo", use_local_synchronization=True)
        return SealedGroup(ranks, self.rank, shared_secret(self.env), group)

    @cached_property
    def _on_cpu(self) -> dist.ProcessGroup | None:
        """The group of all ranks for CPU tensors; None if the default group takes them. Collective at first."""
        if self.size == 1 or "cpu:" in dist.get_backend_config():
            return None
        with closed_once_connected():
            group: dist.ProcessGroup = dist.new_group(backend="gloo")
            return group

    def wait_for_rank_0(self) -> None:
        """Wait until rank 0 calls this too. Collective; unlike in a collective of gloo, rank 0 may take hours."""
        # gloo's collectives time out after half an hour, so this one uses messages.
        number, kind = next(self._waits), "rank 0 is here"
        if self.is_chief:
            self.messages.to_all(kind, number)
        else:
            what = "finished the work that it does alone"
            self.messages.from_rank_0(kind, what, limit_s=ON_RANK_0_S, is_it=lambda value: value >= number)

    @cached_property
    def _waits(self) -> Iterator[int]:
        return itertools.count()

    # --- for threads

    @cached_property
    def messages(self) -> GangMessages:
        """The connection to rank 0, which any thread may use and which needs no collectives. `start` opens it."""
        return open_messages(self.rank, self.size, self.nodes, self.env, self._on_cpu)

    @cached_property
    def node_messages(self) -> GangMessages:
        """The connection to the first rank of this node, like `messages`; on one node, `messages`."""
        return open_node_messages(self.messages, self.local_rank, self.local_size)

    @property
    def leaders(self) -> range:
        """The first rank of each node."""
        return range(0, self.size, self.local_size)


def _gpus(count: int, env: Mapping[str, str]) -> str:
    visible = f"CUDA_VISIBLE_DEVICES is {env.get('CUDA_VISIBLE_DEVICES', 'not set')!r}"
    return f"{count or 'no'} GPU{'' if count == 1 else 's'} ({visible})"


# --- the ports of gloo


LAZY = "TORCH_GLOO_LAZY_INIT"
"""Name of torch's environment variable with which gloo connects two ranks only when they first exchange data."""
_FILES = Path("/proc/self/fd")


@contextmanager
def closed_once_connected() -> Iterator[None]:
    """Close the ports that gloo opens within the block, in which a process group is made.

    gloo keeps listening as long as its group exists, although no rank of the group connects any more. It keeps every
    connection that another process makes, and aborts when it cannot accept one more: as many connections as a process
    may have open files, 1024 on many clusters, would end a training (gloo/transport/tcp/listener.cc: "accept: Too many
    open files").
    """
    before = _listening()
    yield
    if LAZY not in os.environ:  # with lazy connections the ports are still needed after the block
        for descriptor in _listening() - before:
            with suppress(OSError):  # if no Unix socket can be made, the port stays open
                _replace(descriptor)


def _listening() -> set[int]:
    """Return the descriptors of this process's listening TCP sockets."""
    return {number for number in map(int, os.listdir(_FILES)) if _listens(number)}


def _listens(descriptor: int) -> bool:
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:  # not a socket, or closed meanwhile
        return False
    try:
        is_tcp = borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.type == socket.SOCK_STREAM
        return is_tcp and bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        borrowed.detach()  # the descriptor belongs to gloo: the socket object must not close it


def _replace(descriptor: int) -> None:
    """Replace the descriptor by a listening Unix socket that no process can connect to.

    gloo calls accept() and close() on the descriptor and ends the process if either fails, so it must stay a socket.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as nobody:
        at = os.open(folder, os.O_RDONLY)
        try:
            nobody.bind(f"{_FILES}/{at}/socket")  # the folder's own path may exceed the 108 bytes of a socket's path
        finally:
            os.close(at)
        nobody.listen()
        nobody.setblocking(False)
        os.dup2(nobody.fileno(), descriptor, inheritable=False)
