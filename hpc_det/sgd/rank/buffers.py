"""A node's buffers as its ranks write to them: each is mapped once, and no later snapshot waits for a page."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from hpc_det.checkpoint.torch_layout import layout_of

_ROOM = 2**20
"""Bytes by which a state may grow before its buffer is mapped anew."""


class Buffers:
    def __init__(self, descriptors: list[int]) -> None:
        """Of anonymous memory (hpc_det.sgd.elastic.held), which other processes read as files."""
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
