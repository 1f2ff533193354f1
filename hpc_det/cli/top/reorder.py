"""The screen in which the user's waiting jobs are reordered, as `hpc-det job update`, `hold` and `release` do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Static

from hpc_det.cli.job.hold import hold_one, release_one
from hpc_det.cli.job.list import experiment_of, own_waiting_jobs
from hpc_det.cli.job.operations import operation
from hpc_det.cli.job.update import update_all
from hpc_det.cli.top.screens import WIDEST, Prompt
from hpc_det.cli.top.tasks import Said, Tasks
from hpc_det.errors import visible
from hpc_det.plan.priority import FIRST, LAST
from hpc_det.schedulers.queue import QueuedJob
from hpc_det.schedulers.scheduler import JobState
from hpc_det.view.formatting import NONE, date_and_time

KEYS = "u earlier  d later  p priority  h hold  r release  escape back"
HEADINGS = ("JOB", "EXPERIMENT", "NAME", "POOL", "PRIORITY", "REASON", "START")
AGAIN_S = 10.0
"""Seconds between two queries of the scheduler."""


class Queued(Message):
    """A thread has read the queue."""

    def __init__(self, jobs: list[QueuedJob]) -> None:
        super().__init__()
        self.jobs = jobs


class Reorder(ModalScreen[None]):
    """The user's waiting jobs in scheduling order, with keys that change this order."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("u", "move(-1)"),
        ("d", "move(1)"),
        ("p", "prioritize"),
        ("h", "hold"),
        ("r", "release"),
        ("escape,q", "dismiss"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._jobs: list[QueuedJob] = []
        self._table: DataTable[Text] = DataTable(cursor_type="row", cell_padding=1)
        self._status = Static("asking the scheduler ...", id="status", markup=False)
        self._tasks = Tasks(self, lambda act: self.run_worker(act, thread=True))

    def compose(self) -> ComposeResult:
        yield Static("Your waiting jobs, in scheduling order".ljust(WIDEST), classes="bar", markup=False)
        yield self._table
        yield self._status
        yield Static(KEYS.ljust(WIDEST), classes="bar", markup=False)

    def on_mount(self) -> None:
        self._table.focus()
        self._ask()
        self.set_interval(AGAIN_S, self._ask)

    def _ask(self) -> None:
        self._tasks.run("ask", lambda: Queued(own_waiting_jobs()))

    def on_queued(self, event: Queued) -> None:
        """Show the jobs; the selected one stays selected."""
        if event.jobs and not self._jobs:
            self._status.update("")
        selected, self._jobs = self._selected(), event.jobs
        rows = [tuple(map(visible, _cells(job))) for job in self._jobs]
        self._table.clear(columns=True)
        for heading, *texts in zip(HEADINGS, *rows, strict=True):
            self._table.add_column(heading, width=max(map(len, (heading, *texts))))
        for row in rows:
            self._table.add_row(*(Text(text, no_wrap=True) for text in row))
        names = [job.named for job in self._jobs]
        if selected and selected.named in names:
            self._table.move_cursor(row=names.index(selected.named), animate=False)
        if not self._jobs:
            self._status.update("none of your jobs waits in the queue")

    def _selected(self) -> QueuedJob | None:
        place = self._table.cursor_row
        return self._jobs[place] if 0 <= place < len(self._jobs) else None

    # --- keys

    def action_move(self, by: int) -> None:
        """Move the selected job past the next one of its pool: by -1 ahead of it, by 1 behind it."""
        if not (job := self._selected()):
            return
        line = [other for other in self._jobs if set(other.pools) & set(job.pools)]
        place = [other.named for other in line].index(job.named) + by
        if not 0 <= place < len(line):
            self._status.update(f"job {job.job_id} is the {'first' if by < 0 else 'last'} of your jobs in its pool")
            return
        self._update(job, "ahead-of" if by < 0 else "behind-of", line[place].job_id)

    def action_prioritize(self) -> None:
        if job := self._selected():
            question = f"Priority of job {job.job_id}, {FIRST} to {LAST}, lower starts earlier; now {job.priority:g}:"
            self.app.push_screen(
                Prompt(question), lambda value: self._update(job, "priority", value) if value else None
            )

    def action_hold(self) -> None:
        if job := self._selected():
            self._do(partial(hold_one, job.job_id))

    def action_release(self) -> None:
        if job := self._selected():
            self._do(partial(release_one, job.job_id))

    def _update(self, job: QueuedJob, name: str, value: str) -> None:
        self._do(lambda: "; ".join(update_all([operation(job.job_id, name, value)])))

    def _do(self, act: Callable[[], str]) -> None:
        """Run `act` in a thread, show its sentence or error, and read the queue again."""
        self._status.update("...")
        self._tasks.run("change", lambda: Said(act()))

    def on_said(self, event: Said) -> None:
        event.stop()  # the app has a status line, too
        self._status.update(visible(event.text.replace("\n", "; ")))
        self._ask()


def _cells(job: QueuedJob) -> tuple[str, ...]:
    experiment = experiment_of(job)
    reason = f"after {', '.join(job.waits_for)}" if job.waits_for else job.reason
    if job.state is JobState.HELD and not reason:
        reason = "held"
    return (
        job.job_id,
        str(experiment.id) if experiment else NONE,
        job.name,
        job.pool,
        f"{job.priority:g}",
        reason or NONE,
        date_and_time(job.starts),
    )
