"""Read the recorded answers of a real PBS."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "pbs" / "recorded"
SEEN_BY_MANAGERS = {"schedselect", "euser", "egroup", "hashname", "queue_rank", "queue_type", "run_version"}


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(errors="replace")


def recorded_jobs(name: str) -> dict[str, dict[str, Any]]:
    """Return the jobs as a user sees them, by ID."""
    jobs = json.loads(recorded(f"qstat/{name}.json"))["Jobs"]
    return {
        job_id: {key: value for key, value in job.items() if key not in SEEN_BY_MANAGERS}
        for job_id, job in jobs.items()
    }


def recorded_job(name: str) -> dict[str, Any]:
    """Return the first of the jobs."""
    return next(iter(recorded_jobs(name).values()))


def recorded_names(text: str) -> str:
    """Return `text` with the recorded site's names of nodes, if nodes have addresses for names."""
    return text.replace("127.0.1.", "pbsn")


@dataclass
class Step:
    """One command of a transcript."""

    command: str
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    code: int = 0


def transcript(name: str) -> list[Step]:
    steps: list[Step] = []
    for line in recorded(name).splitlines():
        if line.startswith("$ "):
            steps.append(Step(line[2:]))
        elif line.startswith("out| ") or line == "out|":
            steps[-1].out.append(line[5:])
        elif line.startswith("err| ") or line == "err|":
            steps[-1].err.append(line[5:])
        elif line.startswith("rc = "):
            steps[-1].code = int(line[5:])
    return steps


Story = dict[tuple[str, str], list[str]]
"""By node and role: what each process logged, in order."""


def story(log: str) -> Story:
    """Parse lines `seconds host role ... event`; if there is only one node, its key is `node`."""
    found: Story = {}
    lines = [line.split() for line in log.splitlines() if re.match(r" *[+-]?\d+\.\d+ ", line)]
    notes = [(words[1], words[2].rstrip(":"), _event(words[3:])) for words in lines if words[1] != "ADMIN"]
    one_node = len({host for host, _, _ in notes}) == 1
    for host, role, event in notes:
        if event:
            found.setdefault(("node" if one_node else host, role), []).append(event)
    return found


def _event(words: list[str]) -> str:
    """Return the event without PIDs, and without events that depend only on the job's own shell."""
    text = " ".join(word for word in words if not re.match(r"(pid|ppid|sid|task|top-shell)=|\d+$", word))
    kinds = (
        r"start|got SIG\w+|exit \d+ after grace|rank checkpoint done|checkpoint done|all ranks done|child ended|.* gone"
    )
    match = re.match(kinds, text)
    return match[0] if match else ""
