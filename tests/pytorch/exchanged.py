"""Record the collectives of ranks over gloo with torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

WIDTHS = {"float": 4, "c10::Half": 2, "unsigned char": 1, "int": 4, "long int": 8}

Exchange = tuple[str, int]
"""The name of a collective and the bytes that this rank sent."""


def exchanged(work: Callable[[], Any]) -> list[Exchange]:
    """Return all collectives of this rank during `work`, sorted by size, because gloo's threads have no fixed order."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event["name"].startswith("gloo:")]
    return sorted((event["name"].removeprefix("gloo:"), _bytes(event["args"])) for event in found)


def _bytes(arguments: dict[str, Any]) -> int:
    (elements,), kind = arguments["Input Dims"][0], arguments["Input type"][0]
    return int(elements) * WIDTHS[kind]
