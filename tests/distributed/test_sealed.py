from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.sealed import SealedGroup, shared_secret
from hpc_det.errors import HpcDetError
from hpc_det.node.key import user_key
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of the function, or the text of its HpcDetError."""
    try:
        return function(*arguments)
    except HpcDetError as error:
        return str(error)


# --- what was not sealed by a rank of the run


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Forger(SealedGroup):
    """A member that takes part in all collectives without knowing the secret."""

    def __init__(self, distributed: Distributed) -> None:
        super().__init__(range(distributed.size), distributed.rank, b"a guess")


def receive_a_trap(distributed: Distributed, method: str, forger: int, path: Path) -> Any:
    if distributed.rank == forger:
        outcome(getattr(Forger(distributed), method), Trap(path))
        return None
    group = SealedGroup(range(distributed.size), distributed.rank, b"the secret")
    return outcome(getattr(group, method), "harmless")


@pytest.mark.parametrize(("method", "forger"), [("gather", 2), ("gather", 1), ("allgather", 2), ("broadcast", 0)])
def test_what_a_stranger_sends_is_never_unpickled(on_ranks: OnRanks, tmp_path: Path, method: str, forger: int) -> None:
    path = tmp_path / "executed"
    received = on_ranks(3, receive_a_trap, method, forger, path)
    assert not path.exists()
    receivers = {"gather": [0], "allgather": [0, 1], "broadcast": [1, 2]}[method]
    for rank in receivers:
        assert unnamed(received[rank], f"rank {rank}", f"rank {forger}", "HPC_DET_ROOT") == []
    pickle.loads(pickle.dumps(Trap(path)))
    assert path.exists(), "the trap itself is dull"


class Repeating(SealedGroup):
    """A member that sends its first message repeatedly, as an attacker who has recorded it could."""

    recorded: bytearray | None = None

    def _sealed(self, data: Any) -> bytearray:
        self.recorded = self.recorded or super()._sealed(data)
        return bytearray(self.recorded)


def gather_twice(distributed: Distributed, repeater: int) -> list[Any]:
    kind = Repeating if distributed.rank == repeater else SealedGroup
    group = kind(range(distributed.size), distributed.rank, b"the secret")
    return [outcome(group.gather, number) for number in range(2)]


def test_a_message_counts_once(on_ranks: OnRanks) -> None:
    assert on_ranks(2, gather_twice, -1) == [[[0, 0], [1, 1]], [None, None]]
    first, second = on_ranks(2, gather_twice, 1)[0]
    assert first == [0, 0]
    assert unnamed(second, "rank 0", "rank 1") == []


def under_another_rank(distributed: Distributed) -> Any:
    """Ranks 1 and 2 both claim to be rank 1."""
    group = SealedGroup(range(3), distributed.rank, b"the secret")
    group._rank = min(distributed.rank, 1)
    return outcome(group.gather, distributed.rank)


def test_a_message_counts_for_its_sender_only(on_ranks: OnRanks) -> None:
    assert unnamed(on_ranks(3, under_another_rank)[0], "rank 0", "rank 2") == []


def in_two_runs(distributed: Distributed) -> bool:
    """Return whether two runs with the same secret, such as two scripts of one user, seal a text alike."""
    runs = [SealedGroup(range(2), distributed.rank, b"the secret") for _ in range(2)]
    first, second = (run._sealed("same") for run in runs)
    return first == second


def test_what_was_recorded_in_another_run_of_the_user_does_not_fit(on_ranks: OnRanks) -> None:
    assert on_ranks(2, in_two_runs) == [False, False]


def out_of_step(distributed: Distributed) -> Any:
    group = SealedGroup(range(2), distributed.rank, b"the secret")
    group._collectives += distributed.rank
    return outcome(group.allgather, "x")


def test_ranks_that_are_out_of_step_are_told(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, out_of_step)
    assert unnamed(first, "rank 0", "rank 1", "collectives", "order") == []
    assert unnamed(second, "rank 1", "rank 0", "collectives", "order") == []


# --- the secret


def test_the_secret_of_the_attempt_comes_first(state_folder: Path) -> None:
    env = {"HPC_DET_SECRET": "from the agent", "HPC_DET_ROOT": str(state_folder)}
    assert shared_secret(env) == b"from the agent"
    assert not list(state_folder.iterdir())


def test_without_an_agent_the_user_has_a_key(tmp_path: Path) -> None:
    root = tmp_path / "new" / "folder"
    env = {"HPC_DET_ROOT": str(root)}
    secret = shared_secret(env)
    assert len(secret) == 32
    assert shared_secret(env) == secret
    assert [(path.name, path.stat().st_mode & 0o777) for path in root.iterdir()] == [("key", 0o600)]
    assert root.stat().st_mode & 0o777 == 0o700
    assert shared_secret({"HPC_DET_ROOT": str(tmp_path / "other")}) != secret


def key_of_rank(distributed: Distributed, root: Path) -> Any:
    distributed.barrier()
    return user_key(root / "key")


def test_ranks_that_make_it_at_once_have_one_key(on_ranks: OnRanks, tmp_path: Path) -> None:
    keys = on_ranks(4, key_of_rank, tmp_path)
    assert len({*keys}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_where_no_key_can_be_made_the_remedy_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused(HpcDetError, "key", os.strerror(errno.EEXIST), "HPC_DET_ROOT"):
        shared_secret({"HPC_DET_ROOT": str(tmp_path / "file")})


def everything_but_objects(distributed: Distributed, blocked: Path) -> Any:
    distributed = replace(distributed, env={"HPC_DET_ROOT": str(blocked)})
    assert distributed.gather_json(1) == [1, 1]
    assert distributed.sum(torch.ones(1)).tolist() == [2]
    return outcome(distributed.allgather, 1)


def test_the_secret_is_asked_for_by_object_collectives_alone(on_ranks: OnRanks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for said in on_ranks(2, everything_but_objects, tmp_path / "file"):
        assert unnamed(said, tmp_path / "file", os.strerror(errno.EEXIST), "secret", "HPC_DET_ROOT") == []
    assert Distributed(env={"HPC_DET_ROOT": str(tmp_path / "file")}).gather(1) == [1]
