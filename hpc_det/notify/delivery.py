"""How a hook is notified of a change: by a command, a web address or a mail. Each has a time limit, and may fail."""

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
    """Of what nobody wants, and of a pause: a sentence."""
    best: dict[str, Any] | None
    """{"metric", "value", "trial"}"""
    folder: str
    host: str
    """Where it was noticed."""
    time: str
    """ISO 8601, with the time zone."""

    @classmethod
    def of(cls, view: ExperimentView, state: ExperimentState) -> News:
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
        """A line for people."""
        why = f": {self.why}" if self.why else ""
        best = f"; best {self.best['metric']} {self.best['value']} in trial {self.best['trial']}" if self.best else ""
        return f"Experiment {self.experiment} ({self.name}) is {self.state}{why}{best}"

    def to_json(self) -> str:
        """`text` is what Slack and others like it show."""
        return json.dumps({**asdict(self), "text": self.text})


TIME_LIMIT_S = 20.0
_SENDMAIL_FOLDERS = ("/usr/sbin", "/usr/lib")  # no user's PATH has them


class HookError(Exception):
    """Why a hook was not told, in words without secrets."""


def send(hook: Mapping[str, Any], news: News) -> None:
    """Tell one hook of the key `notify`. Raises HookError."""
    match hook:
        case {"command": [*command]}:
            _run(command, f"{news.to_json()}\n".encode(), news)
        case {"webhook": str(url)}:
            _post(url, news.to_json().encode())
        case {"mail": str(address)}:
            _run([_sendmail(), "-t", "-i"], _mail(address, news), news)


def named(hook: Mapping[str, Any]) -> str:
    """The hook as a log may show it: the rest of a webhook's address is a secret."""
    match hook:
        case {"command": [program, *_]}:
            return f"command {program}"
        case {"webhook": str(url)}:
            return f"webhook of {urlsplit(url).hostname}"
    return f"mail to {hook['mail']}"


def _run(command: Sequence[str], given: bytes, news: News) -> None:
    """In the folder of the experiment's code. Files, not pipes: a process left behind would keep a pipe open."""
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
            kill_tree(process)  # it has no session of its own: a job's worker ends all other sessions
            raise HookError(f"did not end within {TIME_LIMIT_S:g} s, and was killed") from None
        if code:
            raise HookError(f"ended with {code}{_last_line(output.fileno())}")


def _last_line(output: int) -> str:
    """What a command said last."""
    end = os.fstat(output).st_size
    lines = os.pread(output, 1000, max(end - 1000, 0)).decode(errors="replace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    return f": {''.join(char for char in said if char.isprintable())}" if said else ""


def _post(url: str, body: bytes) -> None:
    """TLS is verified, and proxies are those of the environment, as urllib does it."""
    import urllib.error
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """What is told may be for this address alone; a POST that is redirected would become a GET anyway."""

        def redirect_request(self, *_: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "hpc_det"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        urllib.request.build_opener(NoRedirects).open(request, timeout=TIME_LIMIT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        moved = "; give the address that it redirects to" if 300 <= error.code < 400 else ""
        raise HookError(f"answered {error.code}{moved}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise HookError(f"cannot be reached: {reason}") from None
    except Exception as error:  # what http.client says of an address or an answer may hold the address
        raise HookError(f"no answer that is HTTP ({type(error).__name__})") from None


def _sendmail() -> str:
    found = shutil.which("sendmail", path=os.pathsep.join([os.environ.get("PATH", ""), *_SENDMAIL_FOLDERS]))
    if found is None:
        raise HookError(f"there is no sendmail on {os.uname().nodename}")
    return found


def _mail(address: str, news: News) -> bytes:
    """As sendmail -t reads it; the sender is whoever runs it."""
    from email.message import EmailMessage

    message = EmailMessage()
    message["To"] = address
    message["Subject"] = f"[hpc_det] experiment {news.experiment} ({news.name}) is {news.state}"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{news.text}\n\n{news.folder}\n{news.time} on {news.host}\n")
    return message.as_bytes()
