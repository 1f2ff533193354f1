"""Record what the processes of a job send: one file in $CHAOS_TAP per connection, named by its start time."""

import os
import socket
import time
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
    recorded.file = Path(os.environ["CHAOS_TAP"], f"{time.time_ns()}-{os.getpid()}-{recorded.fileno()}")
    return recorded


socket.create_connection = _recorded
