"""The store in which ranks exchange addresses: messages of an ended generation do not reach the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hpc_det.node.frames import Message
from hpc_det.sgd.rank.store import StoreKeeper


def line_of(generation: int) -> Any:
    heads: list[dict[str, Any]] = []
    return SimpleNamespace(identity={"generation": generation}, heads=heads, send=lambda head, body: heads.append(head))


def test_what_a_rank_of_an_ended_generation_says_late_is_not_kept() -> None:
    keeper, ended, living = StoreKeeper(2), line_of(1), line_of(2)
    keeper.answer(ended, Message({"store": "set", "id": 0, "keys": ["address"]}, b"where nobody is"))
    keeper.answer(living, Message({"store": "check", "id": 0, "keys": ["address"]}, b""))
    assert ended.heads == []
    assert living.heads == [{"store": 0, "result": False}]
