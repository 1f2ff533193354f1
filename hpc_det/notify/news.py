"""What hooks are told."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

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
            time=datetime.now().astimezone().isoformat(timespec="seconds"),
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
