"""The signals that the processes of a job receive when it is deleted, signalled, preempted, or reaches its walltime, as
recorded.

All jobs of a recording run at once; each recording is a separate test.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from itertools import groupby

import pytest

from tests.labs.pbs_lab import Job, PbsLab
from tests.labs.pbs_recorded import RECORDED, Story, recorded, recorded_names, story
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.long

ONE_NODE = [
    "direct__qdel__exit-after-3s",
    "direct__qdel__ignore-term-killdelay2",
    "direct__qsig__exit-after-3s",
    "direct__walltime__exit-after-3s",
    "direct__walltime__ignore-term",
    "direct-bash-trap__qdel__exit-after-3s",
    "script-trap-bgchild__qdel__exit-after-3s",
    "script-trap-bgchild__qdel__ignore-term",
    "script-trap-bgchild__qsig__ignore-term",
    "script-trap-bgchild__walltime__ignore-term",
    "script-plain-fg__qdel__exit-after-3s",
    "script-exec__qdel__exit-after-3s",
]
GANGS = [
    "gang-direct-pbsdsh__qdel__exit-after-3s",
    "gang-direct-pbsdsh__qsig__ignore-term",
    "gang-script-pbsdsh__qdel__ignore-term",
    "gang-script-tmrsh__qdel__ignore-term",
    "gang-script-stays__qdel__save5s",
]
JOBS = {
    "direct": "tracer.py",
    "direct-bash-trap": "f5_direct_bash.sh",
    "script-trap-bgchild": "f1_script_trap_child.sh",
    "script-plain-fg": "f4_script_foreground.sh",
    "script-exec": "f3_script_exec.sh",
    "gang-direct-pbsdsh": "tracer.py",
    "gang-script-pbsdsh": "m1_script_pbsdsh.sh",
    "gang-script-tmrsh": "m3_script_tmrsh.sh",
    "gang-script-stays": "m4_script_stays.sh",
}
ENDED_BY_USR1 = {"script-trap-bgchild__qsig__ignore-term", "gang-direct-pbsdsh__qsig__ignore-term"}
"""The signal ends their session's leader, and the rest is killed, mostly before it can log the signal."""

COUNTS_IN_A_SUBSHELL = "[ $(ls $L.done.* 2>/dev/null | wc -l) -lt 3 ]"
COUNTS_ITSELF = '! { set -- $L.done.*; [ -e "$1" ] && [ $# -ge 3 ]; }'
"""The recorded script was lucky: TERM also kills its subshells, whose output is then empty."""

GRACE_S, KILL_DELAY_S = 0.6, 2
NEVER_S = 600
"""A kill_delay for tests without KILL: it does not come, however slow the machine is."""


class Scene:
    """One recording, repeated: three seconds of it take `GRACE_S`."""

    def __init__(self, lab: PbsLab, recording: str) -> None:
        self.lab, self.recording = lab, recording
        self.form, self.event, self.behaviour = recording.split("__")
        self.grace = "never" if self.ignores_term else str(GRACE_S)
        self.job_id = lab.submit(*self._where(), *self._what())
        self.log = lab.home / "w" / f"{recording}.{self.job_id}"
        self.asked = 0.0
        """When the event was requested."""
        self.job: Job = {}

    @property
    def ignores_term(self) -> bool:
        return "ignore" in self.behaviour

    def _where(self) -> list[str]:
        select = "select=3:ncpus=1,place=scatter" if self.form.startswith("gang") else "select=1:ncpus=0"
        return ["-q", "low", "-l", select, "-v", f"SIGLOG={self.recording},GRACE={self.grace}", "-j", "oe"]

    def _what(self) -> list[str]:
        script = str(self.lab.home / "w" / JOBS[self.form])
        tracer = [sys.executable, script]
        log = f"{self.lab.home}/w/{self.recording}.$PBS_JOBID"
        role = "direct" if self.form == "direct" else "rank"
        words = " ".join([*tracer, log, role, self.grace])
        return {
            "direct": ["--", "/bin/sh", "-c", f"exec {words}"],
            "direct-bash-trap": ["--", "/bin/bash", script],
            "gang-direct-pbsdsh": ["--", f"{self.lab.site.bin}/pbsdsh", "--", "/bin/sh", "-c", f"exec {words}"],
        }.get(self.form, [script])

    @property
    def then(self) -> Story:
        return story(recorded(f"signals/{self.recording}.txt"))

    @property
    def now(self) -> Story:
        return story(recorded_names(self.log.read_text()))

    def has_started(self) -> bool:
        wanted = sum(events.count("start") for events in self.then.values())
        return self.log.exists() and self.log.read_text().count(" start") >= wanted

    def act(self) -> None:
        commands = {"qsig": ["qsig", "-s", "SIGUSR1"], "qdel": ["qdel"], "walltime": ["qalter", "-l", "walltime=1"]}
        self.asked = time.time()
        self.lab.run(*commands[self.event], self.job_id)

    def end(self) -> None:
        if self.recording == "direct__qsig__exit-after-3s":
            wait_for(lambda: "got SIGUSR1" in self.log.read_text())
            self.lab.run("qsig", "-s", "SIGTERM", self.job_id)
        self.job = self.lab.wait_for(self.job_id, "F")


def copy_jobs(lab: PbsLab) -> None:
    """Copy the recorded jobs to the home folder of the site, where they were recorded, with this Python and these host
    names.
    """
    (folder := lab.home / "w").mkdir()
    for path in (RECORDED / "jobs").iterdir():
        text = re.sub(r"(/usr/bin/)?python3 ", f"{sys.executable} ", path.read_text())
        text = text.replace("$(hostname)", "$HOSTNAME").replace(COUNTS_IN_A_SUBSHELL, COUNTS_ITSELF)
        text = text.replace("socket.gethostname()", 'os.environ.get("HOSTNAME", socket.gethostname())')
        (folder / path.name.removesuffix(".txt")).write_text(text.replace("sleep 5;", f"sleep {GRACE_S};"))


def play(recordings: list[str], kill_delay_s: int, session_poll_s: float) -> Iterator[dict[str, Scene]]:
    """Yield the scenes of the recordings. `kill_delay_s`: for those that ignore TERM."""
    lab = PbsLab.start(session_poll_s=session_poll_s)
    try:
        copy_jobs(lab)
        scenes = {name: Scene(lab, name) for name in recordings}
        for ignore_term, delay_s in ((True, kill_delay_s), (False, NEVER_S)):
            lab.set_kill_delay("low", delay_s)
            those = [scene for scene in scenes.values() if scene.ignores_term is ignore_term]
            for scene in those:
                wait_for(scene.has_started, DEADLINE_S)
                scene.act()
            for scene in those:
                scene.end()
        yield scenes
    finally:
        lab.stop()


@pytest.fixture(scope="module")
def one_node() -> Iterator[dict[str, Scene]]:
    yield from play(ONE_NODE, KILL_DELAY_S, session_poll_s=0.1)


@pytest.fixture(scope="module")
def gangs() -> Iterator[dict[str, Scene]]:
    yield from play(GANGS, kill_delay_s=NEVER_S, session_poll_s=5 * GRACE_S)


def end_of(recording: str) -> dict[str, str]:
    """Return state, substate, run_count and Exit_status of the recording's last line."""
    line = recorded(f"signals/{recording}.txt").strip().splitlines()[-1]
    found = dict(re.findall(r"(job_state|substate|run_count|Exit_status) = (\S+)", line))
    comment = line.partition("comment = ")[2].partition(" run_count")[0]
    found["comment"] = "and" + comment.rpartition(") and")[2] if ") and" in comment else ""
    return found


def assert_as_recorded(scene: Scene) -> None:
    if scene.recording in ENDED_BY_USR1:
        assert {event for events in scene.now.values() for event in events} <= {"start", "got SIGUSR1"}
    else:
        assert distinct(scene.now) == distinct(scene.then)
        assert all(len(scene.now[process]) <= len(events) for process, events in scene.then.items())
    wanted = end_of(scene.recording)
    ending = wanted.pop("comment").strip()
    assert {name: str(scene.job[name]) for name in wanted} == wanted
    assert ending in scene.job["comment"]


def distinct(events: Story) -> Story:
    """Return the events without repetitions, in order, but sorted for a shell: when it gets TERM while its child dies
    of it, it may log either first.

    The recorded rank beside pbsdsh gets TERM twice within 10 ms. Signals do not queue (signal(7)): a process that does
    not run in between gets one.
    """
    found = {process: [line for line, _ in groupby(lines)] for process, lines in events.items()}
    return {(node, role): sorted(lines) if role == "script" else lines for (node, role), lines in found.items()}


@pytest.mark.parametrize("recording", ONE_NODE)
def test_one_node(one_node: dict[str, Scene], recording: str) -> None:
    assert_as_recorded(one_node[recording])


@pytest.mark.parametrize("recording", GANGS)
def test_gang(gangs: dict[str, Scene], recording: str) -> None:
    assert_as_recorded(gangs[recording])


def test_kill_comes_no_earlier_than_the_queue_s_kill_delay(one_node: dict[str, Scene]) -> None:
    for recording in ("direct__qdel__ignore-term-killdelay2", "script-trap-bgchild__qdel__ignore-term"):
        scene = one_node[recording]
        ended_at = time.mktime(time.strptime(scene.job["obittime"]))  # in whole seconds
        assert ended_at + 1 > scene.asked + KILL_DELAY_S


def test_ranks_that_ignore_term_are_killed_once_the_first_node_s_script_is_gone(gangs: dict[str, Scene]) -> None:
    """However long kill_delay is: this is the effect of a launcher that exits on TERM on its ranks."""
    scene = gangs["gang-script-pbsdsh__qdel__ignore-term"]
    ended_at = time.mktime(time.strptime(scene.job["obittime"]))
    assert ended_at < scene.asked + NEVER_S
