"""The stop request: one small file that names the attempt it is meant for.

A request left over from an earlier attempt must not fire in the next one, so readers compare the attempt.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hpc_det.node.json_files import made, read_json, write_json

# "signal" is what an agent knows: the scheduler's facts tell preemption and time limit apart afterwards. "time limit"
# comes from the job's own clock; with "pause" and "cancel" the ranks save and leave, with "kill" they are ended.
# "resume check" comes from the ranks themselves, which have stopped to see whether they resume exactly.
Reason = Literal["signal", "time limit", "pause", "cancel", "kill", "resume check"]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    attempt: int | None
    """None: whichever attempt runs or starts next."""
    reason: Reason
    source: str
    """Who asks: a host and a signal, or a command."""
    time: float
    deadline: float | None = None
    """When the ranks will be gone, saved or not; None: unknown. Seconds since the epoch, as `time`."""

    def concerns(self, attempt: int) -> bool:
        return self.attempt is None or self.attempt == attempt


def read_stop(path: Path, attempt: int) -> StopRequest | None:
    """The request that stands for `attempt`."""
    data = read_json(path)
    request = made(StopRequest, data, path) if data else None
    return request if request and request.concerns(attempt) else None


def request_stop(
    path: Path, *, attempt: int | None, reason: Reason, source: str, deadline: float | None = None
) -> StopRequest:
    """Write a request; where one stands already, that one is kept, but `kill` overrules everything."""
    standing = read_stop(path, attempt) if attempt is not None else None
    if standing and reason != "kill":
        return standing
    request = StopRequest(attempt=attempt, reason=reason, source=source, time=time.time(), deadline=deadline)
    write_json(path, asdict(request))
    return request
