"""Notifying one hook: running a command, posting to a webhook, or sending a mail, each with a time limit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpc_det.node.process import kill_tree
from hpc_det.view.formatting import iso
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import best, why


@dataclass(frozen=True, kw_only=True)
class News:
    """A change of the state of one experiment."""

    experiment: int
    name: str
    state: str
    why: str | None
    """The reason for the state, for instance for an error or a pause; None: the state needs no explanation."""
    best: dict[str, Any] | None
    """{"metric", "value", "trial"} of the best validation; None before the first one."""
    folder: str
    """The experiment's folder."""
    host: str
    """The host of the process that sends the notification."""
    time: str
    """Time of the notification in ISO 8601, with the time zone."""

    @classmethod
    def of(cls, view: ExperimentView, state: ExperimentState) -> News:
        """Return the change of this experiment to `state`, now."""
        found = best(view)
        return cls(
            experiment=view.id,
            name=view.about().name,
            state=state.value,
            why=why(view, state),
            best={key: found[key] for key in ("metric", "value", "trial")} if found else None,
            folder=str(view.folder.path),
            host=os.uname().nodename,
            time=iso(time.time()),
        )

    @property
    def text(self) -> str:
        """The change as one line for people."""
        why = f": {self.why}" if self.why else ""
        best = f"; best {self.best['metric']} {self.best['value']} in trial {self.best['trial']}" if self.best else ""
        return f"Experiment {self.experiment} ({self.name}) is {self.state}{why}{best}"

    def to_json(self) -> str:
        """Return the change as a JSON map."""
        # Slack and similar services show the value of "text"
        return json.dumps({**asdict(self), "text": self.text})


TIME_LIMIT_S = 20.0
"""Seconds that a hook may take."""
_SENDMAIL_FOLDERS = ("/usr/sbin", "/usr/lib")  # usually not in the PATH of users


class HookError(Exception):
    """A hook failed. The text contains no secrets."""


def send(hook: Mapping[str, Any], news: News) -> None:
    """Notify one hook, an entry of the key `notify`. Raises HookError."""
    match hook:
        case {"command": [*command]}:
            _run(command, f"{news.to_json()}\n".encode(), news)
        case {"webhook": str(url)}:
            _post(url, news.to_json().encode())
        case {"mail": str(address)}:
            _run([_sendmail(), "-t", "-i"], _mail(address, news), news)


def named(hook: Mapping[str, Any]) -> str:
    """Return the name of the hook for logs, without secrets."""
    # the path of a webhook's address is a secret
    match hook:
        case {"command": [program, *_]}:
            return f"command {program}"
        case {"webhook": str(url)}:
            return f"webhook of {urlsplit(url).hostname}"
    return f"mail to {hook['mail']}"


def _run(command: Sequence[str], given: bytes, news: News) -> None:
    """Run a command in the experiment's folder of code, with `given` on stdin. Raises HookError."""
    # files, not pipes: a process that the command leaves running would keep a pipe open
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(given)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command,
                cwd=Path(news.folder) / "code",
                env={**os.environ, "HPC_DET_EXPERIMENT": str(news.experiment), "HPC_DET_STATE": news.state},
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise HookError(f"{error.filename}: {error.strerror}") from None
        try:
            code = process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            # not by session: the command has no new one, because a job's worker kills all sessions but its own
            kill_tree(process)
            raise HookError(f"did not exit within {TIME_LIMIT_S:g} s, and was killed") from None
        if code:
            raise HookError(f"exited with {code}{_last_line(output.fileno())}")


def _last_line(output: int) -> str:
    """Return ": " and the last line of a command's output that is not empty; "" if there is none."""
    end = os.fstat(output).st_size
    lines = os.pread(output, 1000, max(end - 1000, 0)).decode(errors="replace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    return f": {''.join(char for char in said if char.isprintable())}" if said else ""


def _post(url: str, body: bytes) -> None:
    """Send a POST request. Raises HookError.

    urllib verifies TLS certificates, and uses the proxies of the environment.
    """
    import urllib.error
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """Rejects redirects."""

        # The notification may be confidential to the given address, and urllib would turn a redirected POST into a GET.

        def redirect_request(self, *_: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "hpc_det"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        urllib.request.build_opener(NoRedirects).open(request, timeout=TIME_LIMIT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        moved = "; set the address that it redirects to" if 300 <= error.code < 400 else ""
        raise HookError(f"answered with HTTP status {error.code}{moved}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise HookError(f"cannot be reached: {reason}") from None
    except Exception as error:  # its text is not used: errors of http.client may contain the address
        raise HookError(f"the answer is not valid HTTP ({type(error).__name__})") from None


def _sendmail() -> str:
    found = shutil.which("sendmail", path=os.pathsep.join([os.environ.get("PATH", ""), *_SENDMAIL_FOLDERS]))
    if found is None:
        raise HookError(f"sendmail not found on {os.uname().nodename}, neither in PATH nor in /usr/sbin, /usr/lib")
    return found


def _mail(address: str, news: News) -> bytes:
    """Return a message for `sendmail -t`, which takes the recipient from it; the sender is the user of this process."""
    from email.message import EmailMessage

    message = EmailMessage()
    message["To"] = address
    message["Subject"] = f"[hpc_det] experiment {news.experiment} ({news.name}) is {news.state}"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{news.text}\n\n{news.folder}\n{news.time} on {news.host}\n")
    return message.as_bytes()
