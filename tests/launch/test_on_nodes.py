"""One agent on each host of a PBS job, with starters that pass on no environment, like those of PBS."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_det.launch.on_nodes import OnNodes, present_attempt
from hpc_det.launch.orders import Order
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.schedulers.pbs.hosts import HostFolder
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.store.attempt import first_failure
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.journal import Journal
from tests.facts import unnamed
from tests.launch.gang import Gang as JobGang
from tests.launch.gang import children, is_there
from tests.launch.watch.suspension import Suspension
from tests.stub import Stub
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

LINES = ["n1", "n1", "n2", "n3"]
BARE = 'env -i PATH=/bin:/usr/bin PBS_TASKNUM=7 GPU_VISIBLE_DEVICES=7 "HOST=$host" "$@"'
TMRSH = f"host=$1; shift; exec {BARE}"
PBSDSH = f"host=line$2; shift 3; {BARE}; exit 0"
ALL_BEGIN = "open(f'{OUT}/{RANK}', 'w')\nwhile len(os.listdir(OUT)) < 3: time.sleep(0.01)\n"
REPOSITORY = str(Path(__file__).parents[2])


class Gang:
    """`on_nodes` with agents of a few lines of Python."""

    def __init__(
        self, folder: Path, starter: str, agent: str, *, through: str = "", before: str = "", **env: str
    ) -> None:
        """Start it. `before`: Python to run before `on_nodes`; `through`: a command that executes its arguments."""
        (folder / "nodes").write_text("\n".join(LINES) + "\n")
        (folder / "jobs").mkdir()
        self.jobs, self.out, self.log = folder / "jobs", folder / "out", folder / "log"
        self.out.mkdir()
        self.trial = ExperimentFolder(folder).trial()
        code = f"import os, sys, signal, time\nOUT, RANK = {str(self.out)!r}, os.environ['HPC_DET_NODE_RANK']\n{agent}"
        main = f"import sys\n{before}\nfrom hpc_det.launch import on_nodes\nsys.exit(on_nodes.main(sys.argv[1:]))"
        command = [sys.executable, "-c", main, starter, self.jobs, sys.executable, "-c", code]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*shlex.split(through), *map(str, command), str(self.trial.path), "1", "0"],
                env={**os.environ, "PBS_NODEFILE": str(folder / "nodes"), "PYTHONPATH": REPOSITORY, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)

    def said(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir())

    def until_said(self, count: int) -> None:
        wait_for(lambda: len(self.said()) == count, otherwise=self.log.read_text)


@pytest.fixture(params=["pbs_tmrsh", "pbsdsh"])
def starter(request: pytest.FixtureRequest, stub: Stub) -> str:
    stub("pbs_tmrsh", TMRSH)
    stub("pbsdsh", PBSDSH)
    name: str = request.param
    return name


def test_each_host_runs_one_agent_in_the_environment_of_the_script(tmp_path: Path, starter: str) -> None:
    agent = "import json; json.dump(dict(os.environ), open(f'{OUT}/{RANK}', 'w')); print('said by', RANK)"
    gang = Gang(tmp_path, starter, agent, SECRET="it's $mine\n", PBS_TASKNUM="1", GPU_VISIBLE_DEVICES="0")
    assert gang.end() == 0
    assert gang.said() == ["0", "1", "2"]
    found = [json.loads((gang.out / rank).read_text()) for rank in gang.said()]
    names = {"pbs_tmrsh": ["n1", "n2", "n3"], "pbsdsh": ["line0", "line2", "line3"]}
    assert [env["HOST"] for env in found] == names[starter]
    assert {env["SECRET"] for env in found} == {"it's $mine\n"}
    assert {env["GPU_VISIBLE_DEVICES"] for env in found} == {"7"}  # a site's hook sets the host's own value
    assert {env["PBS_TASKNUM"] for env in found} == {"7"}
    assert sorted(gang.log.read_text().splitlines()) == ["said by 0", "said by 1", "said by 2"]
    assert not list(gang.jobs.iterdir())


def test_an_agent_that_fails_ends_the_others(tmp_path: Path, starter: str) -> None:
    gang = Gang(tmp_path, starter, ALL_BEGIN + "if RANK == '1': sys.exit(3)\ntime.sleep(60)")
    assert gang.end() == 1
    assert first_failure(gang.trial, 1) is None  # the agent itself has reported its failure


@pytest.mark.parametrize(
    ("gone", "facts"),
    [
        ("1", ["node n2", "agent"]),
        ("012", ["n1", "agent"]),  # a failure of all hosts is the fault of none
    ],
)
def test_agents_that_are_gone_without_a_word_are_named(
    tmp_path: Path, starter: str, gone: str, facts: list[str]
) -> None:
    gang = Gang(tmp_path, starter, "os.symlink(str(os.getppid()), f'{OUT}/{RANK}'); time.sleep(60)")
    gang.until_said(3)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none reacts to the end of another
        for rank in gone:
            os.kill(int(os.readlink(gang.out / rank)), number)
    assert gang.end() == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert unnamed(failure.sentence(), *facts) == []
    assert failure.node_lost == (gone == "1")


def test_what_pbs_does_not_kill_with_the_job_leaves_by_itself(tmp_path: Path, starter: str) -> None:
    gang = Gang(tmp_path, starter, "open(f'{OUT}/{RANK}', 'w'); time.sleep(60)", through="sh -c '\"$@\"; true' sh")
    gang.until_said(3)
    (there,) = children(gang.process.pid)
    gang.process.kill()
    gang.end()
    wait_for(lambda: not is_there(there))
    assert not list(gang.jobs.iterdir())
    assert first_failure(gang.trial, 1) is None


TIME_IS_OVER = """
import glob
from hpc_det.launch import on_nodes
class Clock(on_nodes.AwakeClock):
    def seconds(self):
        return super().seconds() + 120 * (len(glob.glob("{jobs}/.nodes-*/begun-*")) == 2)
on_nodes.AwakeClock = Clock
"""
"""Advances the clock by 120 s once two of the three hosts have begun."""


def test_a_host_on_which_nothing_starts_is_excluded(tmp_path: Path, stub: Stub) -> None:
    """For a lost host, the pbsdsh of a real PBS waits as long as PBS does."""
    stub("pbsdsh", f'[ "$2" != 2 ] || exec sleep 60; {PBSDSH}')
    gang = Gang(tmp_path, "pbsdsh", "time.sleep(60)", before=TIME_IS_OVER.format(jobs=tmp_path / "jobs"))
    assert gang.end() == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert failure.node_lost
    assert unnamed(failure.sentence(), "node n2", "agent", "pbsdsh", "120 s") == []


def test_a_starter_that_outlives_its_agent_is_ended(tmp_path: Path, stub: Stub) -> None:
    """The pbsdsh of a real PBS keeps waiting when the MoM of its host has died."""
    stub("pbsdsh", f"(host=line$2; shift 3; {BARE})\necho $$ >>{tmp_path}/starters\nexec sleep 60")
    before = "from hpc_det.launch import on_nodes; on_nodes.STARTER_LEAVES_S = 0.2"
    gang = Gang(tmp_path, "pbsdsh", "open(f'{OUT}/{RANK}', 'w')", before=before)
    started = time.monotonic()
    assert gang.end() == 0
    assert time.monotonic() - started < 60
    assert first_failure(gang.trial, 1) is None
    starters = (tmp_path / "starters").read_text().split()
    assert len(starters) == 3
    assert not [pid for pid in starters if is_there(int(pid))]


def test_a_term_reaches_every_agent_and_everybody_stays_until_all_have_left(tmp_path: Path, starter: str) -> None:
    agent = """
def leave(*_):
    time.sleep(0.2 * int(RANK))
    open(f'{OUT}/{RANK}.saved', 'w')
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(f'{OUT}/{RANK}', 'w')
while True: time.sleep(0.01)
"""
    gang = Gang(tmp_path, starter, agent)
    gang.until_said(3)
    gang.process.send_signal(signal.SIGTERM)
    assert gang.end() == 0
    assert [name for name in gang.said() if name.endswith(".saved")] == ["0.saved", "1.saved", "2.saved"]


def test_a_starter_that_the_site_lacks_is_the_users_error(tmp_path: Path) -> None:
    gang = Gang(tmp_path, "mpiexec", "", PATH="/nonexistent")
    assert gang.end() == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert failure.user_error
    assert unnamed(failure.message, "cluster.start_agents_with: ", "mpiexec", os.strerror(errno.ENOENT)) == []


def test_mpiexec_starts_all_agents_and_gives_them_their_ranks(tmp_path: Path, stub: Stub) -> None:
    each = 'for rank in 0 1 2; do env -i PATH=/bin:/usr/bin PMI_RANK=$rank "$@" & done; wait'
    stub("mpiexec", f'[ "$1 $2" = "-n 3" ] || exit; shift 2; {each}')
    gang = Gang(tmp_path, "mpiexec", ALL_BEGIN + "sys.exit(RANK == '2')")
    assert gang.end() == 1
    assert gang.said() == ["0", "1", "2"]


def test_hosts_may_still_begin_after_a_suspension_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suspension = Suspension(monkeypatch)
    look = OnNodes._look

    def after_an_hour(gang: OnNodes) -> None:
        suspension.lasts()
        look(gang)

    monkeypatch.setattr(OnNodes, "_look", after_an_hour)
    node = f"sleep 1; touch {tmp_path}/begun-0; echo 0 >{tmp_path}/exit-0"
    gang = OnNodes(HostFolder(tmp_path), 1)
    try:
        assert gang.run(iter([(range(1), ["sh", "-c", node])])) == 0
    finally:
        gang._signals.close()
    assert gang.not_begun == []


# --- the attempt to which a lost agent belongs


def test_a_lost_agent_belongs_to_the_attempt_that_its_worker_runs_now(gang: JobGang) -> None:
    first = Order(trial=str(gang.trial.path), attempt=1, worker=0)
    gang.plan("true")
    gang.journal.started(1, "7", worker=0)
    assert present_attempt(first) == (gang.trial, 1)
    gang.journal.ended(
        1, AttemptEnd(cause=Cause.FAILED, steps=0), Decision(Action.RESTART, "failure 1"), None, nodes=[]
    )
    gang.journal.started(2, "7", worker=0)
    assert present_attempt(first) == (gang.trial, 2)


def test_a_lost_agent_belongs_to_the_trial_that_its_worker_trains_now(gang: JobGang) -> None:
    gang.search_for(name="random", max_trials=4)
    gang.plan("true")
    search = SearchJournal(gang.experiment)
    search.claim(0, "7", after=None)
    first = search.state().open[0].trial
    second = search.end(0, first, Exit.COMPLETED)
    assert second is not None
    trial = gang.experiment.trial(second.trial)
    trial.create()
    Journal(trial.journal).started(1, "7", worker=0)
    found = present_attempt(Order(trial=str(gang.experiment.trial(first).path), attempt=1, worker=0))
    assert (found[0].path, found[1]) == (trial.path, 1)
