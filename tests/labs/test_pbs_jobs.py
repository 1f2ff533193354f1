"""The environment, nodes and processes of a job, and the processes that pbsdsh and pbs_tmrsh start for it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.labs.pbs import mom
from tests.labs.pbs_lab import PbsLab
from tests.labs.pbs_recorded import RECORDED, recorded
from tests.wait import wait_for

ENVDUMP = (RECORDED / "jobs" / "envdump.sh").read_text()
OF_THIS_MACHINE = {"MANPATH", "HOSTNAME"}
"""The recorded site's profile sets the first; the lab sets the second if a node cannot have a host name."""


def output(lab: PbsLab, job: str, name: str = "out") -> str:
    lab.wait_for(job, "F")
    return (lab.home / name).read_text()


def environment(text: str) -> dict[str, str]:
    lines = text.split("== PBS_NODEFILE")[0].splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


def test_environment_and_nodefile_of_a_script(pbs_lab: PbsLab) -> None:
    select = "select=2:ncpus=2:ngpus=2:mpiprocs=2,place=scatter"
    text = output(pbs_lab, pbs_lab.submit("-l", select, "-j", "oe", "-o", "out", script=ENVDUMP))
    then = recorded("env/select-2x2cpu-2gpu-2mpiprocs-scatter.txt")
    now = environment(text)
    assert now.keys() - OF_THIS_MACHINE == environment(then).keys() - OF_THIS_MACHINE
    same = ("ENVIRONMENT", "NCPUS", "OMP_NUM_THREADS", "PBS_ENVIRONMENT", "PBS_NODENUM", "PBS_QUEUE", "PBS_TASKNUM")
    assert {name: now[name] for name in same} == {name: environment(then)[name] for name in same}
    first, second = pbs_lab.nodes[:2]
    assert f"== PBS_NODEFILE\n{first}\n{first}\n{second}\n{second}\n== cwd {pbs_lab.home} " in text
    assert "== umask 0077" in text
    assert re.search(r"-bash\n.* \\_ /bin/bash \S+/0\.pbshead\.SC\n", text)
    assert re.search(r"== stdin\npipe:", text)


def test_environment_of_a_program_and_of_a_subjob(pbs_lab: PbsLab) -> None:
    program = pbs_lab.submit("-N", "direct", "-j", "oe", "-o", "out", "--", "/usr/bin/env")
    text = output(pbs_lab, program)
    now, then = environment(text), environment(recorded("env/direct-exec.txt"))
    assert now.keys() - OF_THIS_MACHINE == then.keys()
    assert now["PATH"] == then["PATH"]
    array = pbs_lab.submit("-J", "3-5", "-j", "oe", "-o", "sub.^array_index^", script=ENVDUMP)
    now, then = environment(output(pbs_lab, array, "sub.4")), environment(recorded("env/array-subjob-4.txt"))
    assert now.keys() - OF_THIS_MACHINE == then.keys() - OF_THIS_MACHINE
    assert (now["PBS_ARRAY_INDEX"], now["PBS_ARRAY_ID"]) == ("4", array)
    assert now["PBS_JOBID"] == array.replace("[]", "[4]")


# pbsdsh -s, -n, -o and plain; failing ranks; pbs_tmrsh with and without a path, and to hosts that are not the job's.
SPAWNING = """
export FROM_SCRIPT=hello
r() { echo "\\$ $*"; eval "$@"; echo "rc = $?"; }
NAME='echo ${HOSTNAME:-$(hostname)}'
r 'pbsdsh -- /bin/sh -c "$NAME"'
r 'pbsdsh -n 1 -- /bin/sh -c "$NAME"'
r 'pbsdsh -s -- /bin/sh -c "$NAME"'
r 'pbsdsh -n 0 -- /bin/sh -c "exit 3"'
r 'pbsdsh -- true'
r 'pbsdsh -- /bin/sh -c "echo T=\\$PBS_TASKNUM N=\\$PBS_NODENUM C=\\$NCPUS F=\\$FROM_SCRIPT \\$PATH \\$(umask) \\$PWD"'
r 'pbs_tmrsh HOST2 /bin/sh -c "$NAME; exit 5"'
r 'pbs_tmrsh HOST2 true'
r 'pbs_tmrsh HOST3 true'
r 'pbs_tmrsh nosuchhost true'
r 'pbs_tmrsh HOST2 /nonexistent'
r 'qsub -N from_inside -- /bin/true'
r 'qrerun $PBS_JOBID'
r 'qalter -p 7 $PBS_JOBID'
"""


def test_processes_on_the_job_s_nodes(pbs_lab: PbsLab) -> None:
    """Compare with misc/pbsdsh-tmrsh.txt: two processes on the first node, one on the second."""
    first, second, third = pbs_lab.nodes
    script = SPAWNING.replace("HOST2", second).replace("HOST3", third)
    select = "select=1:ncpus=2:mpiprocs=2+1:ncpus=1,place=scatter"
    text = output(pbs_lab, pbs_lab.submit("-l", select, "-j", "oe", "-o", "out", script=script))
    answers_by_command = {part.split("\n")[0]: part.splitlines()[1:] for part in text.split("$ ")[1:]}
    answers = list(answers_by_command.values())
    tail = f"F= /bin:/usr/bin 0077 {pbs_lab.home}"
    assert [sorted(lines[:-1]) + lines[-1:] for lines in answers] == [
        [first, first, second, "rc = 0"],
        [first, "rc = 0"],
        [first, first, second, "rc = 0"],
        ["pbsdsh: task 0x00000000 exit status 3", "rc = 0"],
        ["rc = 0"],
        [f"T=0000000{n} N=0 C=2 {tail}" for n in "AB"] + [f"T=40000004 N=1 C=1 {tail}", "rc = 0"],
        [second, "rc = 5"],
        ["rc = 0"],
        [f'pbs_tmrsh: host "{third}" is not a node in job <0.pbshead>', "rc = 255"],
        ['pbs_tmrsh: host "nosuchhost" is not a node in job <0.pbshead>', "rc = 255"],
        ["/nonexistent: No such file or directory", "rc = 254"],
        ["1.pbshead", "rc = 0"],
        ["qrerun: Unauthorized Request  0.pbshead", "rc = 159"],
        ["rc = 0"],
    ]


def test_processes_of_other_nodes_die_with_the_job(pbs_lab: PbsLab) -> None:
    script = "pbsdsh -- /bin/sh -c 'echo up >up.$PBS_NODENUM; exec sleep 99' & while [ ! -e go ]; do sleep 0.05; done\n"
    job = pbs_lab.submit("-l", "select=3:ncpus=1,place=scatter", script=script)
    wait_for(lambda: len(list(pbs_lab.home.glob("up.*"))) == 3)
    (pbs_lab.home / "go").touch()
    assert pbs_lab.wait_for(job, "F")["Exit_status"] == 0
    wait_for(lambda: pbs_lab.strays() == [])


@pytest.mark.integration
def test_a_process_that_has_just_begun_hears_what_is_sent_to_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setsid = os.setsid

    def later() -> None:
        time.sleep(0.3)  # as if other processes used the cores
        setsid()

    monkeypatch.setattr(os, "setsid", later)
    nowhere = Path(os.devnull)
    sleeps = mom.Program(["/bin/sleep", "60"], {}, tmp_path, 0o077, output=nowhere, error=nowhere)
    pid = mom.start(sleeps)
    mom.signal_sessions([pid], signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_process_that_leaves_its_session_is_left_behind(pbs_lab: PbsLab) -> None:
    """PBS without cgroups leaves it behind; the fixture would fail a test for it."""
    script = "setsid sh -c 'touch left; exec sleep 600' &\nuntil [ -e left ]; do sleep 0.05; done\n"
    pbs_lab.wait_for(pbs_lab.submit(script=script), "F")
    wait_for(lambda: [stray.split(" ", 1)[1] for stray in pbs_lab.strays()] == ["sleep 600"])
    (stray,) = pbs_lab.strays()
    pbs_lab.run("kill", stray.split()[0])
    wait_for(lambda: not pbs_lab.strays())
