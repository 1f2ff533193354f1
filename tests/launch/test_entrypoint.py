"""The start of entrypoints on a node, with a fork server that imports a package in place of torch."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.launch.entrypoint import _TORCHRUN, Entrypoint, Starter, without_torchrun
from tests.wait import wait_for

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "hpc_det.launch.direct", "train.py"]
"""Outside of an attempt the launcher prints an error, once, and exits."""


class Node:
    def __init__(self, code: Path) -> None:
        (code / "torch").mkdir()
        (code / "torch" / "__init__.py").touch()
        (code / "torch" / "_dynamo.py").touch()
        (code / "train.py").write_text("import torch\n")
        self.code, self.log = code, code / "log"
        self.command = COMMAND
        self.environment = {**os.environ, "PYTHONPATH": f"{code}:{os.environ.get('PYTHONPATH', '')}"}
        self.starter = Starter()

    @property
    def server(self) -> int | None:
        """The process id of the fork server, if there is one."""
        return self.starter._server.process.pid if self.starter._server else None

    def prepare(self) -> None:
        self.starter.prepare(self.command, self.environment, str(self.code))

    def start(self, selector: selectors.BaseSelector) -> Entrypoint:
        return self.starter.start(self.command, self.environment, str(self.code), self.log, selector)

    def run(self) -> int:
        """Run an attempt, and return how often the launcher has run in it."""
        self.prepare()
        self.log.write_text("")
        with selectors.DefaultSelector() as selector:
            entrypoint = self.start(selector)

            def has_ended() -> bool:
                for key, _ in selector.select(0.01):
                    key.data()
                return entrypoint.poll() is not None

            wait_for(has_ended)
            self.starter.forget()
        return self.log.read_text().count("HPC_DET_FOLDER")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.starter.close()


def test_attempts_share_a_fork_server(node: Node) -> None:
    assert node.run() == 1
    server = node.server
    assert server
    assert node.run() == 1
    assert node.server == server


@pytest.mark.parametrize(("ending", "is_forked"), [("", True), ("; exit 3", False)])
def test_a_command_line_is_forked_unless_it_needs_a_shell(node: Node, ending: str, is_forked: bool) -> None:
    node.command = ["/bin/sh", "-c", " ".join(COMMAND) + ending]
    node.prepare()
    assert (node.server is not None) is is_forked
    if is_forked:
        assert node.run() == 1


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["--trial", "model_def:MyTrial"], True),
        (["--", "train.py", "--", "x"], True),
        (["--max-restarts=1", "--", "train.py"], False),
        (["--help"], False),
        ([], False),
    ],
)
def test_one_rank_needs_torchrun_only_for_overrides(arguments: list[str], changed: bool) -> None:
    for command in (
        ["python3", "-m", _TORCHRUN, *arguments],
        ["/bin/sh", "-c", f"python3 -m {_TORCHRUN} {' '.join(arguments)}"],
    ):
        expected = ["python3", "-m", "hpc_det.launch.direct", *arguments] if changed else command
        assert without_torchrun(command) == expected


def test_an_attempt_that_ended_before_its_entrypoint_leaves_the_imports_to_the_next(node: Node) -> None:
    node.prepare()
    server = node.server
    node.starter.forget()
    assert node.run() == 1
    assert node.server == server


def test_an_entrypoint_that_was_not_forked_yet_is_not_forked_later(node: Node) -> None:
    node.prepare()
    server = node.server
    with selectors.DefaultSelector() as selector:
        node.start(selector)
        node.starter.forget()
    assert node.server is None
    assert node.run() == 1
    assert node.server not in (None, server)


def test_a_fork_server_that_was_killed_is_replaced(node: Node) -> None:
    node.run()
    server = node.server
    assert server
    os.kill(server, signal.SIGKILL)
    node.run()
    assert node.run() == 1
    assert node.server not in (None, server)


def test_a_fork_server_that_cannot_import_is_not_tried_again(node: Node) -> None:
    (node.code / "torch" / "__init__.py").write_text("raise ImportError\n")
    node.run()
    assert node.server is None
    node.run()
    assert node.server is None
