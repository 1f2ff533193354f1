"""The main screen of `hpc-det top`: a table of experiments, the selected experiment, the queue, and the keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.message import Message
from textual.widgets import DataTable, Input, Static

from hpc_det.cli.experiment import describe
from hpc_det.cli.output import COLOURS
from hpc_det.cli.top import cells
from hpc_det.cli.top.experiments import Answers, Experiments, Row, Seen
from hpc_det.cli.top.reorder import Reorder
from hpc_det.cli.top.screens import WIDEST, Details, Help, Logs, Question
from hpc_det.cli.top.tasks import Said, Tasks
from hpc_det.client.continuation import activate_one
from hpc_det.client.stopping import cancel_one, kill_one, pause_one
from hpc_det.errors import visible
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView
from hpc_det.view.summary import Summary

LOOK_S = 1.0
"""Seconds between two reads of the files, and between two reads of the shared cache of scheduler answers."""
WIDE = 120
"""Columns from which the terminal shows the selected experiment and the queue side by side."""
KEYS = (
    ("p", "pause", "save a checkpoint and free the nodes until `activate`"),
    ("a", "activate", "put a paused experiment back into the queue"),
    ("c", "cancel", "save a checkpoint, then end the experiment"),
    ("k", "kill", "end the experiment at once, without a checkpoint"),
    ("r", "reorder", "show your waiting jobs, and change their order, priority or hold"),
    ("l", "logs", "follow the logs"),
    ("enter", "details", "show what `experiment describe` prints"),
    ("/", "filter", "filter by part of a name, state or ID; escape shows all"),
    ("?", "help", "show this list"),
    ("q", "quit", "leave the screen; experiments continue"),
)
"""Each key with the word in the footer, and the sentence in the help."""
_NO_ROOM = ("enter", "/")
"""The keys that a narrow footer leaves to the help."""


class Looked(Message):
    """A thread has read the files."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen


class Top(App[None]):
    """The application: the main screen, and the screens that open over it."""

    TITLE = "hpc-det top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    .bar { height: 1; text-style: reverse; text-wrap: nowrap; }
    #table { height: 1fr; background: ansi_default; }
    #table > .datatable--cursor { text-style: reverse; background: ansi_default; color: ansi_default; }
    #table > .datatable--header { text-style: bold; background: ansi_default; color: ansi_default; }
    #below { height: 10; }
    #detail { height: 6; border-top: solid ansi_bright_black; }
    #queue { height: 4; border-top: solid ansi_bright_black; }
    .wide #below { height: 7; layout: horizontal; }
    .wide #detail, .wide #queue { height: 7; width: 1fr; }
    #status { height: 1; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    Details, Logs, Reorder { background: ansi_default; }
    Reorder DataTable { height: 1fr; background: ansi_default; }
    Reorder .datatable--cursor { text-style: reverse; background: ansi_default; color: ansi_default; }
    Reorder .datatable--header { text-style: bold; background: ansi_default; color: ansi_default; }
    Reorder #status { height: auto; max-height: 4; }
    Question, Prompt, Help { align: center middle; }
    Question Static, Help Static, Prompt Container { width: auto; max-width: 80; height: auto;
        border: solid ansi_default; padding: 1 2; }
    Prompt Container { width: 76; }
    Prompt Static { height: auto; }
    Prompt Input { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("p", "pause"),
        ("a", "activate"),
        ("c", "cancel"),
        ("k", "kill"),
        ("r", "reorder"),
        ("l", "logs"),
        ("question_mark", "help"),
        ("slash", "filter"),
        ("escape", "leave_filter"),
        ("q,ctrl+c", "quit"),
    ]

    def __init__(self, store: ExperimentStore) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colours
        self._store = store
        self._answers = Answers(store.root)
        self._experiments = Experiments(store, self._answers)
        self._seen = Seen([], [], {})
        self._shown: dict[int, tuple[str, ...]] = {}
        """The cells that each row of the table shows, keyed by experiment ID, in the order of the rows."""
        self._widths: dict[str, int] = {}
        """The widths of the table's columns, in characters."""
        self._tasks = Tasks(self, lambda act: self.run_worker(act, thread=True))
        self._needs: dict[str, int] = {}
        """The largest width of each column of the table so far."""
        self._heading = Static(classes="bar", markup=False)
        self._table: DataTable[Text] = DataTable(id="table", cursor_type="row", cell_padding=0)
        self._detail, self._queue = Static(id="detail", markup=False), Static(id="queue", markup=False)
        self._status = Static(id="status", markup=False)
        self._keys = Static(classes="bar", markup=False)
        self._filter = Input(id="filter", placeholder="part of a name, a state or an id", compact=True)

    def compose(self) -> ComposeResult:
        yield self._heading
        yield self._table
        with Container(id="below"):
            yield self._detail
            yield self._queue
        yield self._status
        yield self._filter
        yield self._keys

    def on_mount(self) -> None:
        self.begin_capture_print(self)  # the functions of the command line print notes, see `on_print`
        self._detail.border_title, self._queue.border_title = "selected", "queue"
        self._table.focus()
        self._look()
        self.set_interval(LOOK_S, self._look)

    # --- the display

    def _look(self) -> None:
        self._tasks.run("look", lambda: Looked(self._experiments.look()))
        self._tasks.run("ask", partial(self._answers.ask, self._seen.job_ids))

    def on_looked(self, event: Looked) -> None:
        self._seen = event.seen
        self._show()

    def _show(self) -> None:
        self._heading.update(cells.heading(self._seen.rows).ljust(WIDEST))
        self._fill_table()
        self._show_below()

    def _fill_table(self) -> None:
        """Update the cells that have changed; refill the table only if its rows or widths have changed."""
        wanted = [row for row in self._seen.rows if self._is_wanted(row.summary)]
        texts = [cells.texts(row) for row in wanted]
        self._needs = cells.needed(texts, self._needs)
        width_of = cells.widths(self._needs, self.size.width)
        pairs = zip(wanted, texts, strict=True)
        rows = {row.summary.id: cells.cells(row, its, width_of) for row, its in pairs}
        if [*rows] != [*self._shown] or width_of != self._widths:
            self._refill(rows, width_of)
        for number, shown in rows.items():
            for heading, text, former in zip(width_of, shown, self._shown[number], strict=True):
                if text != former:
                    self._table.update_cell(str(number), heading, _styled(text))
        self._shown = rows

    def _refill(self, rows: dict[int, tuple[str, ...]], width_of: dict[str, int]) -> None:
        """Fill the table again; the selected experiment stays selected."""
        table, selected = self._table, self._selected()
        table.clear(columns=True)
        for heading, width in width_of.items():
            table.add_column(heading, key=heading, width=width)
        for number, texts in rows.items():
            table.add_row(*map(_styled, texts), key=str(number))
        if selected and selected.summary.id in rows:
            table.move_cursor(row=[*rows].index(selected.summary.id), animate=False)
        self._shown, self._widths = rows, width_of

    def _is_wanted(self, found: Summary) -> bool:
        wanted = self._filter.value.casefold()
        return any(wanted in text.casefold() for text in (found.name, found.state.value, str(found.id)))

    def _selected(self) -> Row | None:
        """Return the row under the cursor, or None if the table is empty."""
        numbers, place = [*self._shown], self._table.cursor_row
        number = numbers[place] if place < len(numbers) else None
        return next((row for row in self._seen.rows if row.summary.id == number), None)

    def _show_below(self) -> None:
        row, is_wide = self._selected(), self.size.width >= WIDE
        width = self.size.width // 2 - 1 if is_wide else self.size.width
        self._detail.update(visible("\n".join(cells.detail(row, width))) if row else "no experiments")
        self._queue.update(visible("\n".join(cells.queue(self._seen.jobs, 6 if is_wide else 3, width))))

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= WIDE, "wide")
        self._keys.update(footer(event.size.width).ljust(WIDEST))
        self.call_after_refresh(self._show)  # when the layout has changed

    def on_data_table_row_highlighted(self) -> None:
        self._show_below()

    def _say(self, text: str) -> None:
        """Show the text in the status line, until the next text replaces it."""
        if text.strip():
            self._status.update(visible(text.strip().replace("\n", "; ")))

    def on_said(self, event: Said) -> None:
        self._say(event.text)

    def on_print(self, event: events.Print) -> None:
        """Show in the status line what functions of the command line print, such as notes."""
        self._say(event.text)

    # --- keys

    def action_pause(self) -> None:
        self._ask_and_do("Pause", ": it saves a checkpoint and frees its nodes?", pause_one)

    def action_activate(self) -> None:
        if row := self._selected():
            self._do(activate_one, self._store.folder(row.summary.id))

    def action_cancel(self) -> None:
        self._ask_and_do("Cancel", ": it saves a checkpoint and ends?", cancel_one)

    def action_kill(self) -> None:
        self._ask_and_do("Kill", ", without another checkpoint?", kill_one)

    def action_reorder(self) -> None:
        self.push_screen(Reorder())

    def action_help(self) -> None:
        self.push_screen(Help("\n".join(f"{key:<7}{sentence}" for key, _, sentence in KEYS)))

    def action_logs(self) -> None:
        if row := self._selected():
            self.push_screen(Logs(self._store.folder(row.summary.id)))

    def on_data_table_row_selected(self) -> None:
        if row := self._selected():
            number = row.summary.id
            self.push_screen(Details(f"Details of experiment {number}", partial(self._describe, number)))

    def action_filter(self) -> None:
        self._filter.display = True
        self._filter.focus()

    def action_leave_filter(self) -> None:
        self._filter.value = ""
        self._filter.display = False
        self._table.focus()

    def on_input_changed(self) -> None:
        self._fill_table()

    def on_input_submitted(self) -> None:
        self._table.focus()

    def _ask_and_do(self, verb: str, end: str, act: Callable[[ExperimentFolder], str]) -> None:
        """Call `act` for the selected experiment if the answer to the question is yes."""
        if row := self._selected():
            folder = self._store.folder(row.summary.id)
            question = f"{verb} experiment {folder.id}, {visible(row.summary.name)}{end}"
            self.push_screen(Question(question), lambda yes: self._do(act, folder) if yes else None)

    def _do(self, act: Callable[[ExperimentFolder], str], folder: ExperimentFolder) -> None:
        self._say(f"experiment {folder.id}: ...")
        # named after the experiment, so that a second key is ignored until the first action for it has ended
        self._tasks.run(f"experiment {folder.id}", lambda: Said(act(folder)))

    def _describe(self, number: int) -> str:
        view = ExperimentView(self._store.existing(number))
        return describe.in_words_of(view, view.state(self._answers.of(view.job_ids())))


def footer(width: int) -> str:
    """Return the keys for a footer of `width` characters."""
    whole, short = ("  ".join(f"{key} {word}" for key, word, _ in KEYS if key not in left) for left in ((), _NO_ROOM))
    return whole if len(whole) <= width else short


def _styled(text: str) -> Text:
    return Text(visible(text), style=COLOURS.get(text, ""), no_wrap=True)


def show(store: ExperimentStore) -> None:
    """Run the screen until the user quits."""
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")  # each frame of an animation would be sent through ssh
    Top(store).run()
