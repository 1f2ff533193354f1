"""Commands of an examination run at the same time, and only once each."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hpc_det.doctor.examination import AskedOnce
from hpc_det.schedulers.scheduler import CommandError
from tests.facts import refused
from tests.wait import DEADLINE_S


def test_all_are_asked_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=DEADLINE_S)

    def run(command: Sequence[str]) -> str:
        together.wait()
        return command[0]

    with AskedOnce(run) as asked:
        asked.begin([["sinfo"], ["scontrol"]])
        assert (asked(["sinfo"]), asked(["scontrol"])) == ("sinfo", "scontrol")


def test_none_is_asked_twice() -> None:
    calls: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        calls.append(command)
        raise CommandError("sinfo: refused")

    with AskedOnce(run) as asked:
        asked.begin([["sinfo"]])
        for _ in range(2):
            with refused(CommandError, "sinfo"):
                asked(["sinfo"])
    assert calls == [("sinfo",)]
