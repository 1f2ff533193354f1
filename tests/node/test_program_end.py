from __future__ import annotations

import sys
import threading
from contextlib import suppress

import pytest

from hpc_det.node.program_end import note_exit, uncaught


def exit_of_a_thread() -> None:
    with suppress(SystemExit):
        sys.exit(4)


def test_a_call_of_sys_exit_is_noted_once_and_only_in_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "exit", sys.exit)
    note_exit()
    wrapped = sys.exit
    note_exit()
    assert sys.exit is wrapped
    before = uncaught()
    thread = threading.Thread(target=exit_of_a_thread)
    thread.start()
    thread.join()
    assert uncaught(but=before) == ()
    with pytest.raises(SystemExit) as raised:
        sys.exit("no data")
    assert raised.value.code == "no data"
    assert [error.code for error in uncaught(but=before) if isinstance(error, SystemExit)] == ["no data"]
