"""Behaviour that all queues share."""

from __future__ import annotations

import os
import pwd

import pytest

from hpc_det.errors import printable
from hpc_det.schedulers.queue import queue, this_user


def test_a_queue_is_that_of_its_scheduler() -> None:
    assert [type(queue(name)).__name__ for name in ("slurm", "pbs")] == ["SlurmQueue", "PbsQueue"]


def test_the_user_is_the_systems_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    this_user.cache_clear()
    assert this_user() == pwd.getpwuid(os.geteuid()).pw_name


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    this_user.cache_clear()
    try:
        assert this_user() == "4000000000"
    finally:
        this_user.cache_clear()


def test_a_text_that_a_terminal_would_obey_is_made_harmless() -> None:
    assert printable("a\x1b[31mb\nc größe") == "a\\x1b[31mb\\nc größe"
