"""The screens that open over the table: questions, the keys, the details of an experiment, its logs.

All are modal, because the keys of the table act on a selection that is hidden meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from subprocess import DEVNULL, PIPE, STDOUT
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, RichLog, Static

from hpc_det.cli.output import styled
from hpc_det.errors import HpcDetError
from hpc_det.store.folders import ExperimentFolder

AGAIN_S = 5.0  # seconds between two updates of the details
MOST_LINES = 10_000  # lines of logs that the screen keeps
WIDEST = 500  # characters of a bar, which is reversed text and must fill a terminal of any width
# this installation: another `hpc-det` may be on PATH, or none
HPC_DET = (sys.executable, "-c", "import sys; from hpc_det.cli.main import main; sys.exit(main())")


class Question(ModalScreen[bool]):
    """A question to be answered with y or n; its result is True for yes."""

    BINDINGS: ClassVar[list[BindingType]] = [("y", "dismiss(True)"), ("n,escape,q", "dismiss(False)")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny yes   n no", markup=False)


class Prompt(ModalScreen[str]):
    """A question with a line for the answer; its result is the answer, empty if there is none."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss('')")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Container():
            yield Static(self._question, markup=False)
            yield Input(compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())


class Help(ModalScreen[None]):
    """A text that any of its keys closes."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter,question_mark", "dismiss")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(self._text, markup=False)


class Told(Message):
    """A thread has read the details."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Details(ModalScreen[None]):
    """The output of `experiment describe`, updated every AGAIN_S seconds."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter", "dismiss")]

    def __init__(self, title: str, tell: Callable[[], str]) -> None:
        super().__init__()
        self._title = title
        self._tell = tell

    def compose(self) -> ComposeResult:
        yield Static(self._title.ljust(WIDEST), classes="bar", markup=False)
        with VerticalScroll():
            yield Static("...", id="text", markup=False)
        yield Static("arrows scroll   escape back".ljust(WIDEST), classes="bar", markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self._look()

    def _look(self) -> None:
        self.run_worker(self._ask, thread=True)

    def _ask(self) -> None:
        try:
            told = self._tell()
        except HpcDetError as error:
            told = "\n".join(error.problems)
        except OSError as error:  # the experiment is being deleted
            told = f"{error.filename}: {error.strerror}"
        self.post_message(Told(told))

    def on_told(self, event: Told) -> None:
        self.query_one("#text", Static).update(styled(event.text))
        self.set_timer(AGAIN_S, self._look)  # after the answer, so that slow reads do not overlap


class Printed(Message):
    """The thread that reads the logs has read one line."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line


class Logs(ModalScreen[None]):
    """The output of `experiment logs --follow`, run in a separate process that may block while it waits for lines."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss")]

    def __init__(self, experiment: ExperimentFolder) -> None:
        super().__init__()
        self._experiment = experiment

    def compose(self) -> ComposeResult:
        yield Static(f"Logs of experiment {self._experiment.id}".ljust(WIDEST), classes="bar", markup=False)
        yield RichLog(max_lines=MOST_LINES, wrap=True, highlight=False, markup=False)
        yield Static("arrows scroll   end follows   escape back".ljust(WIDEST), classes="bar", markup=False)

    def on_mount(self) -> None:
        self.query_one(RichLog).focus()
        command = (*HPC_DET, "experiment", "logs", str(self._experiment.id), "--follow", "--tail", str(MOST_LINES))
        root = str(self._experiment.root())
        # PYTHONSAFEPATH: `python -c` would import modules from the current folder
        env = {**os.environ, "HPC_DET_ROOT": root, "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=env)
        self.run_worker(self._follow, thread=True)

    def on_unmount(self) -> None:
        """Terminate the process."""
        self._process.terminate()  # closes the pipe that the thread reads, which ends the thread

    def _follow(self) -> None:
        with self._process as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.post_message(Printed(line.decode(errors="replace").rstrip("\n")))

    def on_printed(self, event: Printed) -> None:
        self.query_one(RichLog).write(Text.from_ansi(event.line))
