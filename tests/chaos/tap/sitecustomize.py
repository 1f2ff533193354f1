"""What the processes of a job send on their connections is recorded: a file for each, in $CHAOS_TAP."""

import os
import socket
from pathlib import Path

_connect = socket.create_connection


class Recorded(socket.socket):
    def sendall(self, data, *flags):
        with self.file.open("ab") as file:
            file.write(data)
        return super().sendall(data, *flags)


def _recorded(*arguments, **named):
    connection = _connect(*arguments, **named)
    limit_s = connection.gettimeout()
    recorded = Recorded(fileno=connection.detach())
    recorded.settimeout(limit_s)
    recorded.file = Path(os.environ["CHAOS_TAP"], f"{os.getpid()}-{recorded.getpeername()[1]}-{recorded.fileno()}")
    return recorded


socket.create_connection = _recorded
