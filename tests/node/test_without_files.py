"""Listeners of a process that can open no more files."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

CHILD = """
import os, resource, selectors, socket, time

{listen}

def is_open_to_more():
    try:
        os.close(os.dup(0))
    except OSError:
        return False
    return True

fewest, most = resource.getrlimit(resource.RLIMIT_NOFILE)
client.setblocking(True)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, most))
while is_open_to_more():
    os.dup(0)
client.connect(address)  # its kernel does that without the listener
used_before, began = time.process_time(), time.monotonic()
while time.monotonic() < began + 1.5:
    turn(0.5)
print(time.process_time() - used_before)
resource.setrlimit(resource.RLIMIT_NOFILE, (fewest, most))
{is_accepted}
print("accepted")
"""

SWITCHBOARD = """
from hpc_det.node.line_server import TcpLineServer
board = TcpLineServer("127.0.0.1", lambda identity: None, lambda address: True)
address, client, turn = (board.host, board.port), socket.socket(), time.sleep
"""

WITHOUT_THREAD = """
from hpc_det.node.line_server import TcpLineServer
board = TcpLineServer("127.0.0.1", lambda identity: None, lambda address: True, has_thread=False)
address, client = (board.host, board.port), socket.socket()
selector = selectors.DefaultSelector()
selector.register(board, selectors.EVENT_READ)
def turn(within_s):
    selector.select(within_s)
    board.turn()
"""

AGENT_SOCKET = """
from hpc_det.node.agent_socket import AgentSocket
address, client = "socket", socket.socket(socket.AF_UNIX)
selector = selectors.DefaultSelector()
agent = AgentSocket(address, selector)
agent.send_stop("signal")
def turn(within_s):
    for key, ready in selector.select(within_s):
        key.data()
    agent.turn()
"""

HEARS = """
client.settimeout(0.01)
while True:
    turn(0.01)
    try:
        assert client.recv(1)
        break
    except TimeoutError:
        pass
"""


@pytest.mark.parametrize("listen", [SWITCHBOARD, WITHOUT_THREAD, AGENT_SOCKET])
def test_a_listener_without_files_uses_no_processor_and_accepts_later(listen: str, tmp_path: Path) -> None:
    program = textwrap.dedent(CHILD).format(listen=listen, is_accepted=HEARS)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    used_s, accepted = done.stdout.splitlines() or [done.stderr, ""]
    assert float(used_s) < 0.1
    assert accepted == "accepted"
