"""Commands that end or pause an experiment, and the hooks that they run."""

from __future__ import annotations

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.schedulers.scheduler import JobState
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.notify.receiver import Receiver
from tests.notify.receiver import receiver as receiver


@pytest.fixture
def hooked(life: Life, receiver: Receiver) -> Life:
    hook = {"command": None, "webhook": receiver.url("/secret"), "mail": None, "states": ["PAUSED", "CANCELED"]}
    write_json(life.folder.effective, {**(read_json(life.folder.effective) or {}), "notify": [hook]})
    return life


def test_a_kill_is_told_once(hpc_det: Command, hooked: Life, scheduler: FakeScheduler, receiver: Receiver) -> None:
    hooked.begins()
    assert hpc_det("e", "kill", 1).succeeds("experiment 1")
    assert hpc_det("e", "kill", 1).code == 2
    assert receiver.news() == [(1, "CANCELED")]


@pytest.mark.parametrize(("command", "state"), [("pause", "PAUSED"), ("cancel", "CANCELED")])
def test_what_waits_in_the_queue_is_told_by_the_command(
    hpc_det: Command, hooked: Life, scheduler: FakeScheduler, receiver: Receiver, command: str, state: str
) -> None:
    scheduler.states = [JobState.QUEUED]
    assert hpc_det("e", command, 1).code == 0
    assert receiver.news() == [(1, state)]


@pytest.mark.parametrize("command", ["pause", "cancel"])
def test_while_trials_save_nothing_is_told(
    hpc_det: Command, hooked: Life, scheduler: FakeScheduler, receiver: Receiver, command: str
) -> None:
    hooked.begins()
    assert hpc_det("e", command, 1).code == 0
    assert receiver.news() == []


def test_a_hook_that_refuses_is_a_note(
    hpc_det: Command, hooked: Life, scheduler: FakeScheduler, receiver: Receiver
) -> None:
    receiver.answer = (404, {})
    hooked.begins()
    note = "hpc-det: note: notifying webhook of 127.0.0.1 of CANCELED failed: answered with HTTP status 404\n"
    assert hpc_det("e", "kill", 1) == (0, "Killed experiment 1\n", note)


def test_the_address_of_a_webhook_stands_in_no_file_for_people(
    hpc_det: Command, root: object, config: object, code: object, slurm_commands: object
) -> None:
    """--explain does not print it either."""
    hook = "notify=[{webhook: 'https://hooks.example.org/secret'}]"
    shown = hpc_det("experiment", "create", config, code, "--config", hook, "--dry-run", "--explain")
    assert (shown.code, "secret" in shown.out, "notify[0]" in shown.out) == (0, False, True)
