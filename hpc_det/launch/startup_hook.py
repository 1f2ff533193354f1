"""The startup hook of a context directory: `startup-hook.sh`, which bash sources on each node before the entrypoint.

As in Determined (master/static/srv/entrypoint.sh), one shell sources the hook under `set -e` and then becomes the
entrypoint, so exports, the working directory, limits and, in a container, installed files stay in effect. Determined
also traces each command (`set -x`); here commands are not traced, since a trace would write exported secrets to the
log.

The shell and the agent communicate through named pipes in the agent's private folder, which containers see, too:

    hook-events    the shell writes "begun" and "ended"
    hook-output    the output of the hook, which the agent copies to the log
    hook-go        the shell waits here for the other nodes' hooks, so that all ranks start around the same time
"""

from __future__ import annotations

import os
import selectors
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_det.launch.hook_environment import AFTER, CHANGES, environment_in
from hpc_det.launch.log_tail import LONGEST_LINE, exit_of, is_kill
from hpc_det.launch.watch.supervisor import SupervisedGang
from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import write_json
from hpc_det.plan.container import PACKAGE, inside
from hpc_det.resources import COMPAT_PATHS
from hpc_det.store.attempt import HOOK, Failure, failure_now

LAST_LINES = 10
"""Lines of the hook's output that its failure contains."""
_LONGEST_PART = 8192
"""Bytes of a line after which it is copied before its end, such as a progress bar."""
_MOST_AT_ONCE = 1 << 18
"""Bytes of output that are copied before the agent does something else; more than a pipe holds (pipe(7))."""
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that launchers set for each rank."""
_OF_SHELLS = ("_", "SHLVL", "PWD", "OLDPWD")
"""Variables that bash sets."""
_EVENTS, _OUTPUT, _GO, _SCRIPT = "hook-events", "hook-output", "hook-go", "hook-script"
_OUTPUT_ENDS = "\0hpc_det"
"""End of the line after the hook's last output, which may lack an end of line."""
# Two descriptors with high numbers and one array are all that the hook finds changed in its shell; bash would choose 10
# and 11, which hooks use for locks. The hook may define functions and aliases with the names of commands. Traces are
# off after the hook, because the lines that follow contain the attempt's secret.
_SHELL = """\
exec 231>&1 232>&2 >{output} 2>&1
hpc_det_entrypoint=("$@")
echo begun >{events}
trap 'case $-${{BASH_SOURCE[0]}} in *e*./{hook}) builtin echo "line-$LINENO" >{events};; esac' ERR
set -eE
source ./{hook}
{{ \\builtin set +eEuxv; \\builtin trap - DEBUG ERR; \\builtin unalias -a; builtin unset -f exec; }} 2>/dev/null
builtin printf '\\0hpc_det\\n'
{own_variables}
builtin command env -0 >{after} 2>/dev/null || /usr/bin/env -0 >{after} 2>/dev/null || builtin :
exec >&231 2>&232 231>&- 232>&-
builtin echo ended >{events}
IFS= builtin read -r hpc_det_line <{go} || builtin exit 1
exec "${{hpc_det_entrypoint[@]}}"
"""


class StartupHook:
    """The hook of one attempt on this node, as its agent sees it."""

    def __init__(self, gang: SupervisedGang, node: int, folder: str, selector: selectors.BaseSelector) -> None:
        """`node`: this node's rank. `folder`: the agent's private folder."""
        self._gang = gang
        self._node = node
        self._folder = folder
        self._selector = selector
        self._prefix = f"[{gang.hosts[node]}] ".encode() if gang.plan.nodes > 1 else b""
        """Text before each line of the hook's output in the gang's log."""
        self._began = time.time()
        self._has_begun = False
        self._has_ended = False
        self.is_over = False
        """True once the hooks of all nodes have ended, and the entrypoint was allowed to start."""
        self._line = 0
        """The line of the hook whose command has ended the shell; 0: unknown."""
        self._partial = b""
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._pipes = {name: self._pipe(name) for name in (_EVENTS, _OUTPUT, _GO)}
        self._before: Mapping[str, str] = {}
        self.on_end: Callable[[], None] = lambda: None
        """Called when the hook has ended on this node."""
        selector.register(self._pipes[_EVENTS], selectors.EVENT_READ, self._on_events)
        selector.register(self._pipes[_OUTPUT], selectors.EVENT_READ, self.copy_output)

    def _pipe(self, name: str) -> int:
        path = self._path(name)
        os.mkfifo(path, 0o600)
        # Also for writing: then neither side waits for the other to open the pipe, and it never ends.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def command(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """Write the shell's script and return the command that runs the hook and then the entrypoint.

        `environment`: that of the entrypoint, as its container sees it if it has one.
        """
        self._before = environment
        places = {name: shlex.quote(self._path(f"hook-{name}")) for name in ("output", "events", "go")}
        lines = [*_kept_variables(self._own(environment)), *_kept_folders(self._own_folders()), *_notes(environment)]
        text = _SHELL.format(hook=HOOK, own_variables="\n".join(lines), after=shlex.quote(self._path(AFTER)), **places)
        write_atomic(Path(self._path(_SCRIPT)), text, private=True)
        self._note_times(ended=None)
        return ("bash", self._path(_SCRIPT), *self._gang.plan.entrypoint)

    def _own(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that keep their values whatever the hook sets."""
        own = {name: value for name, value in environment.items() if name.startswith("HPC_DET_")}
        return own | ({"CUDA_VISIBLE_DEVICES": ""} if self._gang.plan.slot_type == "cpu" else {})

    def _own_folders(self) -> list[str]:
        """Return the folders of PYTHONPATH that ranks need: their code, hpc_det, and its packages
        `determined` and `ray`.
        """
        outside = [self._gang.plan.code, str(Path(PACKAGE).parent), *map(str, COMPAT_PATHS.values())]
        own = {*outside, *inside(os.pathsep.join(outside)).split(os.pathsep)}
        return [folder for folder in self._before["PYTHONPATH"].split(os.pathsep) if folder in own]

    def _note_times(self, *, ended: float | None) -> None:
        """Record on node 0 when the hook began, and when the hooks of all nodes had ended, for those who look."""
        if self._node == 0:
            with suppress(OSError):  # a full disk ends the attempt later, if it matters
                times = {"began": self._began, "ended": ended}
                write_json(self._gang.trial.startup_hook(self._gang.attempt), times)

    @property
    def ended_the_shell(self) -> bool:
        """Return whether the hook has begun and not come to its end: the exit of its shell was caused by the hook."""
        return self._has_begun and not self._has_ended

    def start_entrypoint(self) -> None:
        """Let the entrypoint start."""
        if not self.is_over:
            self.is_over = True
            self._note_times(ended=time.time())
            os.write(self._pipes[_GO], b"go\n")

    def failure(self, code: int, killer: str) -> Failure:
        """Return the failure of a hook that has ended its shell with this code, as subprocess returns it.

        `killer`: what is known about the sender of a SIGKILL.
        """
        self._copy_rest()
        self._on_events()
        last = [line for line in self._last if line.strip()]
        if code == 0:
            message = "ended its shell with exit code 0, so the entrypoint was not started; end it with `return`"
            return failure_now(None, message, startup_hook=True, user_error=True)
        after = f" after {last[-1].strip()[-LONGEST_LINE:]!r}" if last else ""
        by = f"; {killer}" if killer and is_kill(code) else ""
        where = f" in line {self._line}" if self._line else ""
        message = f"{exit_of(code)}{where}{after}{by}; see {self._gang.trial.job_log}"
        return failure_now(None, message, startup_hook=True, traceback="\n".join(last))

    def close(self) -> None:
        """Copy the rest of the output."""
        self._copy_rest()
        for name in (_EVENTS, _OUTPUT):
            self._selector.unregister(self._pipes[name])
        for pipe in self._pipes.values():
            os.close(pipe)

    def _on_events(self) -> None:
        for event in _all_of(self._pipes[_EVENTS]).split():
            self._has_begun = True
            if event.startswith(b"line-"):
                self._line = int(event.removeprefix(b"line-"))
            if event == b"ended" and not self._has_ended:
                self._has_ended = True
                self._write_changes()
                self.on_end()

    def _copy_rest(self) -> None:
        """Copy all output, including a last line without an end."""
        self.copy_output()
        self._copy([self._partial] if self._partial else [])
        self._partial = b""

    def copy_output(self) -> None:
        """Copy the hook's output to this process's stdout, which is the log."""
        *lines, self._partial = (self._partial + _all_of(self._pipes[_OUTPUT])).split(b"\n")
        if len(self._partial) > _LONGEST_PART:
            lines, self._partial = [*lines, self._partial], b""
        self._copy(lines)

    def _copy(self, lines: Sequence[bytes]) -> None:
        mark = _OUTPUT_ENDS.encode()
        lines = [line.removesuffix(mark) for line in lines if line != mark]
        self._last.extend(line.decode(errors="replace") for line in lines)
        copied = b"".join(self._prefix + line + b"\n" for line in lines)
        with suppress(OSError):  # a full disk must not end the agent
            while copied:
                copied = copied[os.write(1, copied) :]

    def _write_changes(self) -> None:
        """Write the names of the variables that the hook has set or unset."""
        after = environment_in(Path(self._path(AFTER)))
        names = sorted(name for name in {*self._before, *after} if self._before.get(name) != after.get(name))
        write_json(Path(self._path(CHANGES)), [name for name in names if name not in _OF_SHELLS], private=True)


def _all_of(pipe: int) -> bytes:
    """Return what is in the pipe now; at most a little more than _MOST_AT_ONCE bytes of a writer that never rests."""
    found = b""
    with suppress(BlockingIOError):
        while len(found) < _MOST_AT_ONCE:
            found += os.read(pipe, 1 << 16)
    return found


def _kept_variables(own: Mapping[str, str]) -> list[str]:
    """Return shell lines that set these variables again, with a note for each that the hook has changed."""
    # No value in the note: one of them is the attempt's secret.
    return [
        f'builtin [ "${{{name}-}}" = {shlex.quote(value)} ] || builtin echo "hpc-det: note: {HOOK}: {name} is set by '
        f'hpc_det; the value of the hook has no effect"\nbuiltin export {name}={shlex.quote(value)}'
        for name, value in own.items()
    ]


def _kept_folders(folders: Sequence[str]) -> list[str]:
    """Return shell lines that put those of these folders that the hook has removed back on PYTHONPATH, at its start."""
    # In reverse, so that they keep their order.
    return [
        f'case ":${{PYTHONPATH-}}:" in *:{shlex.quote(folder)}:*) ;; '
        f"*) builtin export PYTHONPATH={shlex.quote(folder)}${{PYTHONPATH:+:$PYTHONPATH}} ;; esac"
        for folder in reversed(folders)
    ]


def _notes(environment: Mapping[str, str]) -> list[str]:
    """Return shell lines that print a note for each variable of ranks that the hook has changed."""
    return [
        f'builtin [ "${{{name}-}}" = {shlex.quote(environment.get(name, ""))} ] || builtin echo "hpc-det: note: '
        f'{HOOK}: a launcher sets {name} for each rank that it starts; the value of the hook has no effect there"'
        for name in _OF_RANKS
    ]
