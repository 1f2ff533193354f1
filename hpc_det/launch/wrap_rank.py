"""Runs a command and puts its rank before each line of its output; for custom launchers whose ranks share a log.

    python3 -m hpc_det.launch.wrap_rank RANK COMMAND ARGS...

RANK is a number, or a comma-separated list of environment variables, of which the first one that is set is used. Lines
end at `\\n` and at `\\r`, so each state of a progress bar becomes a line. Signals are forwarded to the command. The
exit code is the command's, or 128 + N after signal N.

The rules are upstream's (harness/determined/launch/wrap_rank.py). Its --no-redirect-stdio is accepted without effect.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

from hpc_det.errors import UsageError
from hpc_det.launch.launchers.arguments import HELP, help_text
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, exit_code

LONGEST_LINE = 8191
"""Bytes; longer lines are split, so that lines of several ranks do not mix in a shared log."""
USAGE = "usage: python3 -m hpc_det.launch.wrap_rank RANK COMMAND ARGS..."
_END = re.compile(rb"[\r\n]")


class PrefixedOutput:
    """Copies one stream of the command to the descriptor `target`, with the rank before each line."""

    def __init__(self, stream: IO[bytes], target: int, rank: int) -> None:
        self._stream = stream
        self._target = target
        self._prefix = f"[rank={rank}] ".encode()
        self._partial = b""

    def pass_on(self) -> bool:
        """Wait for output and copy it; return False at the end of the stream."""
        data = os.read(self._stream.fileno(), 1 << 16)
        *lines, self._partial = _END.split(self._partial + data)
        if not data or len(self._partial) > LONGEST_LINE:
            lines += [self._partial] if self._partial else []
            self._partial = b""
        self._write(lines)
        return bool(data)

    def _write(self, lines: Iterable[bytes]) -> None:
        text = b"".join(self._prefix + piece + b"\n" for line in lines for piece in _cut(line))
        while text:
            text = text[os.write(self._target, text) :]


def _cut(line: bytes) -> list[bytes]:
    return [line[start : start + LONGEST_LINE] for start in range(0, len(line) or 1, LONGEST_LINE)]


def parse(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, list[str]]:
    """Return the rank and the command from the arguments. Raises UsageError."""
    words = [*argv]
    if words[:1] == ["--no-redirect-stdio"]:
        words = words[1:]
    rank, command = words[0] if words else "", words[1:]
    if command[:1] == ["--"]:
        command = command[1:]
    if not rank or not command:
        raise UsageError(f"hpc_det.launch.wrap_rank: no {'command' if rank else 'rank'}\n{USAGE}")
    found = rank if rank.isdecimal() else next((env[name] for name in rank.split(",") if name in env), None)
    if found is None or not found.isdecimal():
        said = "is not set" if found is None else f"is {found!r}"
        raise UsageError(f"hpc_det.launch.wrap_rank: {rank} {said}; expected the number of a rank\n{USAGE}")
    return int(found), command


def run(rank: int, command: Sequence[str]) -> int:
    """Run the command and return its exit code; 127 if it cannot be executed."""
    # Ignored signals stay ignored, also in the command: the node agent notifies ranks of a stop over its socket.
    forwarded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    signals = SignalPipe([*forwarded, signal.SIGCHLD])
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    except OSError as error:
        print(f"hpc_det.launch.wrap_rank: {error.filename}: {error.strerror}", file=sys.stderr)
        return 127  # as sh(1) says it
    with selectors.DefaultSelector() as selector:
        selector.register(signals.fd, selectors.EVENT_READ)
        for stream, target in ((process.stdout, 1), (process.stderr, 2)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, PrefixedOutput(stream, target, rank))
        # The command's children may keep its streams open after it has exited: then copy only what has arrived.
        while ready := selector.select(None if process.poll() is None else 0):
            for key, _ in ready:
                if key.data is None:
                    for number in set(signals.received()) & set(forwarded):
                        process.send_signal(number)
                elif not key.data.pass_on():
                    selector.unregister(key.fileobj)
    return exit_code(process.returncode)


def main(argv: list[str]) -> int:
    if argv[:1] in ([flag] for flag in HELP):
        print(help_text(USAGE, __doc__, "  -h, --help  print this text"))
        return 0
    try:
        return run(*parse(argv, os.environ))
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
