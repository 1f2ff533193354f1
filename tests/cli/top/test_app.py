"""The screen, pressed and looked at by Textual's own pilot."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable

from hpc_det.cli.top import app, experiments, screens
from hpc_det.cli.top.app import Top
from hpc_det.schedulers.scheduler import CommandError, JobState
from hpc_det.store.attempt import read_stop
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView
from tests.cli.life import FakeScheduler, Life

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
Story = Callable[["Seen"], Awaitable[None]]


class Seen:
    """The screen as text, and keys."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self._pilot = pilot

    @property
    def text(self) -> str:
        strips = self._pilot.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    @property
    def size(self) -> tuple[int, int]:
        lines = self.text.splitlines()
        return max(map(len, lines)), len(lines)

    def row(self, number: int) -> str:
        """Of an experiment in the table; nothing where it is not there."""
        below_heading = self.text.partition("\n")[2]
        found = re.search(rf"^{number} +\S.*$", below_heading, re.MULTILINE)
        return found[0] if found else ""

    @property
    def selected(self) -> int:
        table = self._pilot.app.screen_stack[0].query_one(DataTable)
        return int(table.ordered_rows[table.cursor_row].key.value or 0)

    async def resize(self, width: int, height: int) -> None:
        await self._pilot.resize_terminal(width, height)

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)

    async def until(self, condition: Callable[[], object]) -> None:
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not condition():
            assert asyncio.get_running_loop().time() < end, f"not within {DEADLINE_S} s\n{self.text}"
            await self._pilot.pause(0.01)

    async def says(self, text: str) -> None:
        await self.until(lambda: text in " ".join(self.text.split()))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come one after the other."""
    monkeypatch.setattr(app, "LOOK_S", 0.05)
    monkeypatch.setattr(experiments, "ROUND_S", 0.1)


@pytest.fixture
def life(root: Path, scheduler: FakeScheduler, live: None) -> Life:
    """Experiment 1, under way."""
    life = Life.submitted(root)
    life.begins()
    life.reports("training", 100, {"loss": 2.0})
    life.reports("validation", 100, {"accuracy": 0.5})
    return life


def tell(root: Path, story: Story, size: tuple[int, int] = (80, 24)) -> None:
    async def run() -> None:
        async with Top(ExperimentStore(root)).run_test(size=size) as pilot:
            seen = Seen(pilot)
            await seen.until(lambda: "slots:" in seen.text)
            await story(seen)

    asyncio.run(run())


def test_all_that_matters_is_seen_on_80_columns_and_24_lines(root: Path, life: Life) -> None:
    async def story(seen: Seen) -> None:
        row = ["1", "digits", "RUNNING", "100/400", "-", "-", "-", "accuracy", "0.5", "▁", "1", "4/4"]
        await seen.until(lambda: seen.row(1).split() == row)
        await seen.says("1 running, 0 queued, 0 paused, 0 ended; slots: 4 in use, 0 waited for")
        await seen.until(lambda: "training: loss 2\n" in seen.text)
        await seen.says("4711 experiment 1 running")
        await seen.says("p pause a activate c cancel k kill r reorder l logs ? help q quit")
        assert seen.size[0] <= 80
        assert seen.size[1] == 24

    tell(root, story)


def test_a_wide_terminal_has_the_queue_beside_the_selected_experiment(root: Path, life: Life) -> None:
    async def story(seen: Seen) -> None:
        await seen.until(lambda: re.search("Experiment 1: digits, RUNNING +4711  experiment 1", seen.text))

    tell(root, story, size=(140, 30))


def test_a_terminal_that_becomes_wider_shows_more_of_the_same(root: Path, life: Life) -> None:
    Life.submitted(root, title="a-name-that-is-rather-long-for-a-column", job_id="4712").begins()

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "a-name-tha" in seen.row(2) and "…" in seen.row(2))
        await seen.press("down")
        await seen.until(lambda: seen.selected == 1)
        await seen.resize(140, 30)
        await seen.until(lambda: "a-name-that-is-rather-long-for-a-column" in seen.row(2))
        assert seen.selected == 1

    tell(root, story)


def test_nothing_is_there_yet(root: Path) -> None:
    async def story(seen: Seen) -> None:
        await seen.says("no experiments")
        await seen.press("p", "k", "l", "enter")
        assert "0 running, 0 queued, 0 paused, 0 ended" in seen.text

    tell(root, story)


def test_the_screen_goes_on_with_the_files(root: Path, life: Life, scheduler: FakeScheduler) -> None:
    async def story(seen: Seen) -> None:
        await seen.until(lambda: "100/400" in seen.row(1))
        life.reports("training", 200, {"loss": 1.0})
        await seen.until(lambda: "200/400" in seen.row(1) and "█▁" in seen.row(1))
        Life.submitted(root, title="another", job_id="4712")
        await seen.until(lambda: "another" in seen.row(2))
        assert seen.selected == 1
        life.finishes()
        await seen.until(lambda: "COMPLETED" in seen.row(1))
        await seen.until(lambda: "1 ended" in seen.text)

    tell(root, story, size=(110, 24))


def test_p_pauses_and_a_activates(
    root: Path, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    activated: list[int] = []

    def again(folder: ExperimentFolder) -> int:
        activated.append(folder.id)
        return 1

    monkeypatch.setattr("hpc_det.client.continuation.submit_again", again)

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("p")
        await seen.says("Pause experiment 1, digits: it saves a checkpoint and frees its nodes?")
        assert not life.trial.stop.exists()
        await seen.press("y")
        await seen.says("Paused experiment 1")
        request = read_stop(life.trial.stop, 1)
        assert request is not None
        assert request.reason == "pause"
        life.search.leave(0)
        await seen.until(lambda: "PAUSED" in seen.row(1))
        await seen.press("a")
        await seen.says("Activated experiment 1")
        assert activated == [1]

    tell(root, story)


def test_c_cancels_only_after_a_yes(root: Path, life: Life) -> None:
    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("c")
        await seen.says("Cancel experiment 1, digits: it saves a checkpoint and ends?")
        await seen.press("escape")
        await seen.until(lambda: "Cancel" not in seen.text)
        assert not life.trial.stop.exists()
        await seen.press("c")
        await seen.says("Cancel experiment 1")
        await seen.press("y")
        await seen.says("Canceled experiment 1")
        request = read_stop(life.trial.stop, 1)
        assert request is not None
        assert request.reason == "cancel"

    tell(root, story)


def test_pace_and_epoch_are_seen_while_it_trains(root: Path, scheduler: FakeScheduler, live: None) -> None:
    life = Life.submitted(root, max_length={"epochs": 8})
    life.begins()
    life.reports("training", 100, {"loss": 2.0}, samples_per_second=640.0)

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "3/8" in seen.row(1) and "640 samples/s" in seen.row(1))
        await seen.says("trial 1, attempt 1, epoch 3 of 8, 640 samples/s")
        life.reports("training", 200, {"loss": 1.0}, samples_per_second=320.0)
        await seen.until(lambda: "5/8" in seen.row(1) and "320 samples/s" in seen.row(1) and "< 1 min" in seen.row(1))

    tell(root, story, size=(120, 24))


def test_the_best_metric_is_whole_while_another_column_has_room(root: Path, life: Life) -> None:
    life.reports("validation", 200, {"accuracy": 0.9812345})

    async def story(seen: Seen) -> None:
        for width in (60, 80, 120):
            await seen.resize(width, 24)
            await seen.until(lambda: "accuracy 0.98123" in seen.row(1))

    tell(root, story)


def test_a_question_mark_shows_all_keys(root: Path, life: Life) -> None:
    async def story(seen: Seen) -> None:
        await seen.press("question_mark")
        await seen.until(lambda: all(re.search(rf"│ +{re.escape(key)} ", seen.text) for key, _, _ in app.KEYS))
        await seen.press("escape")
        await seen.until(lambda: "p pause" in seen.text)

    tell(root, story)


def test_k_kills_only_after_a_yes(root: Path, life: Life, scheduler: FakeScheduler) -> None:
    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("k")
        await seen.says("Kill experiment 1, digits, without another checkpoint?")
        await seen.press("n")
        await seen.until(lambda: "Kill" not in seen.text)
        assert ExperimentView(life.folder).search.cancelled is None
        await seen.press("k")
        await seen.says("Kill experiment 1")
        await seen.press("y")
        await seen.says("Killed experiment 1")
        assert scheduler.cancelled == ["4711"]
        await seen.until(lambda: "CANCELED" in seen.row(1))

    tell(root, story)


def test_what_is_refused_is_said_in_the_status_line(
    root: Path, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CommandError("scancel: refused with exit code 1: Access denied")

    monkeypatch.setattr(scheduler, "cancel", refuse)

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("k")
        await seen.says("Kill experiment 1")
        await seen.press("y")
        await seen.says("scancel: refused with exit code 1: Access denied")
        await seen.press("a")
        await seen.says("experiment 1 is RUNNING")

    tell(root, story)


def test_enter_shows_the_details_and_escape_leaves_them(
    root: Path, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "AGAIN_S", 0.1)

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("enter")
        await seen.says("State: RUNNING Progress: 100 of 400 batches")
        assert "best validation: accuracy 0.5 at batch 100" in seen.text
        await seen.press("p")  # acts on the table alone
        life.reports("training", 250, {"loss": 0.7})
        await seen.says("250 of 400 batches")
        assert not life.trial.stop.exists()
        await seen.press("escape")
        await seen.until(lambda: "p pause" in seen.text)

    tell(root, story)


def test_details_of_an_experiment_that_is_deleted_meanwhile_say_so(
    root: Path, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "AGAIN_S", 0.1)

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("enter")
        await seen.says("State: RUNNING")
        life.folder.remove()
        await seen.says("experiment 1: not found below")

    tell(root, story)


def test_details_of_an_experiment_that_is_deleted_while_they_are_read_say_what_is_gone(
    root: Path, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleted(*_: object) -> str:
        raise FileNotFoundError(2, "No such file or directory", "plan.json")

    monkeypatch.setattr("hpc_det.cli.experiment.describe.in_words_of", deleted)

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("enter")
        await seen.says("plan.json: No such file or directory")

    tell(root, story)


@pytest.mark.integration
def test_l_follows_the_logs_with_their_colours_as_they_are(root: Path, life: Life) -> None:
    life.rank_prints(0, "one [/b] \x1b[31mred\x1b[0m\n")
    life.finishes()

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "COMPLETED" in seen.row(1))
        await seen.press("l")
        await seen.says("[rank=0] one [/b] red")
        await seen.press("escape")
        await seen.until(lambda: "p pause" in seen.text)

    tell(root, story)


@pytest.mark.integration
def test_leaving_logs_that_have_no_end_ends_their_process(root: Path, life: Life) -> None:
    """The check that tests leave no process behind sees one that stays."""
    life.rank_prints(0, "goes on\n")

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.press("l")
        await seen.says("[rank=0] goes on")
        life.rank_prints(0, "further\n")
        await seen.says("[rank=0] further")

    tell(root, story)


def test_a_filter_leaves_what_has_the_text_in_name_state_or_id(root: Path, life: Life) -> None:
    for title in ("wide-net", "mnist"):
        Life.submitted(root, title=title, job_id="5000").begins()

    async def story(seen: Seen) -> None:
        await seen.until(lambda: seen.row(3))
        await seen.press("slash")
        await seen.says("part of a name, a state or an id")
        await seen.press(*"NIST")
        await seen.until(lambda: seen.row(3) and not seen.row(2))
        await seen.press("enter")
        await seen.until(lambda: seen.selected == 3)
        await seen.press("escape")
        await seen.until(lambda: seen.row(1) and seen.row(2))
        assert seen.selected == 3

    tell(root, story)


def test_a_scheduler_that_gives_no_answer_does_not_stop_the_screen(
    root: Path, life: Life, scheduler: FakeScheduler
) -> None:
    scheduler.states = [JobState.UNKNOWN]

    async def story(seen: Seen) -> None:
        await seen.until(lambda: "RUNNING" in seen.row(1))
        await seen.says("4711 experiment 1 unknown")

    tell(root, story)


def test_q_quits(root: Path, life: Life) -> None:
    async def story(seen: Seen) -> None:
        app = seen._pilot.app
        app.simulate_key("q")  # the pilot's own would wait for a screen that goes meanwhile
        async with asyncio.timeout(DEADLINE_S):
            while app.is_running:
                await asyncio.sleep(0.01)

    tell(root, story)
