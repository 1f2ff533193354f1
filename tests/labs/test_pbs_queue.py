"""Jobs that wait: dependencies, arrays, holds, and changes by their owner; as the recorded PBS behaved."""

from __future__ import annotations

import pytest

from tests.labs.pbs_lab import Job, PbsLab
from tests.wait import wait_for

pytestmark = pytest.mark.long

WAITS = ["--", "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exit $0"]
ONE = ["-l", "select=1:ncpus=1"]


def outcome(job: Job) -> tuple[object, ...]:
    return job["job_state"], job["substate"], job.get("Exit_status"), job["Hold_Types"], job.get("depend")


RAN = ("F", 92, 0, "n", None)


def test_dependents_run_or_are_removed(pbs_lab: PbsLab) -> None:
    """A removed job looks successful, except that it has no Exit_status."""
    parents = {"ok": pbs_lab.submit(*ONE, *WAITS, "0"), "bad": pbs_lab.submit(*ONE, *WAITS, "3")}
    parents["del"] = pbs_lab.submit(*ONE, "--", "/bin/sleep", "600")
    kinds = ("afterok", "afternotok", "afterany", "after")
    children = {
        (kind, name): pbs_lab.submit(*ONE, "-W", f"depend={kind}:{parent}", "--", "/bin/true")
        for kind in kinds
        for name, parent in parents.items()
    }
    of_all = pbs_lab.submit(*ONE, "-W", "depend=afterany:" + ":".join(parents.values()), "--", "/bin/true")
    held = pbs_lab.job(children["afterok", "ok"])
    assert outcome(held) == ("H", 22, None, "s", f"afterok:{parents['ok']}@pbshead")
    first = {kind: children[kind, "ok"] for kind in kinds}
    assert pbs_lab.job(parents["ok"])["depend"] == (
        f"beforeok:{first['afterok']}@pbshead,beforenotok:{first['afternotok']}@pbshead,"
        f"beforeany:{first['afterany']}@pbshead:{of_all}@pbshead,before:{first['after']}@pbshead"
    )
    (pbs_lab.home / "go").touch()
    pbs_lab.run("qdel", parents["del"])
    ended = {key: pbs_lab.wait_for(child, "F") for key, child in children.items()}
    removed = {key for key, child in ended.items() if "Exit_status" not in child}
    assert removed == {("afterok", "bad"), ("afterok", "del"), ("afternotok", "ok")}
    for (kind, name), child in ended.items():
        removal = ("F", 92, None, "s", f"{kind}:{parents[name]}@pbshead")
        assert outcome(child) == (removal if (kind, name) in removed else RAN)
    assert outcome(pbs_lab.wait_for(of_all, "F")) == RAN


@pytest.mark.parametrize(
    ("depend", "runs"),
    [("afterok:GOOD", True), ("afternotok:GOOD", False), ("afterok:BAD", False), ("afterany:999999", False)],
)
def test_parents_that_have_ended_or_are_unknown(any_pbs: PbsLab, depend: str, runs: bool) -> None:
    good, bad = (any_pbs.submit("--", "/bin/sh", "-c", f"exit {code}") for code in (0, 3))
    for parent in (good, bad):
        any_pbs.wait_for(parent, "F")
    depend = depend.replace("GOOD", good).replace("BAD", bad)
    child = any_pbs.wait_for(any_pbs.submit("-W", f"depend={depend}", "--", "/bin/true"), "F")
    assert ("Exit_status" in child) == runs


def test_subjobs_are_deleted_one_by_one(pbs_lab: PbsLab) -> None:
    parent = pbs_lab.submit("-J", "0-3", "-l", "select=1:ncpus=1", "--", "/bin/sleep", "600")
    subjobs = [parent.replace("[]", f"[{index}]") for index in range(4)]
    pbs_lab.wait_for(subjobs[3], "R")
    pbs_lab.run("qdel", subjobs[1])
    ended = pbs_lab.wait_for(subjobs[1], "X")
    assert (ended["substate"], ended["Exit_status"]) == (91, 271)
    pbs_lab.run("qdel", parent.replace("[]", "[2-3]"))
    for subjob in subjobs[2:]:
        pbs_lab.wait_for(subjob, "X")
    seen = pbs_lab.job(parent)
    assert (seen["job_state"], seen["Exit_status"]) == ("B", 1)
    assert seen["array_state_count"] == "Queued:0 Running:1 Exiting:0 Expired:3"
    assert (seen["array_indices_submitted"], seen["array_indices_remaining"]) == ("0-3", "-")
    pbs_lab.run("qdel", parent)
    seen = pbs_lab.wait_for(parent, "F")
    assert (seen["substate"], seen["Exit_status"]) == (91, 1)
    assert seen["array_state_count"] == "Queued:0 Running:0 Exiting:0 Expired:0"
    assert seen["comment"].endswith(" and terminated")


def test_an_array_fails_with_its_subjobs_and_queued_ones_are_removed(any_pbs: PbsLab) -> None:
    failing = any_pbs.submit("-J", "0-2:2", *ONE, "--", "/bin/sh", "-c", "exit $PBS_ARRAY_INDEX")
    seen = any_pbs.wait_for(failing, "F")
    assert (seen["substate"], seen["Exit_status"]) == (93, 1)
    assert seen["comment"].endswith(" and failed")
    exits = [any_pbs.job(failing.replace("[]", f"[{index}]"))["Exit_status"] for index in (0, 2)]
    assert exits == [0, 2]
    waiting = any_pbs.submit("-J", "0-3%2", *ONE, "--", "/bin/sleep", "600")
    last = waiting.replace("[]", "[3]")
    any_pbs.wait_for(waiting, "B")
    any_pbs.run("qdel", waiting)
    any_pbs.wait_for(waiting, "F")
    removed = any_pbs.job(last)
    assert (removed["substate"], removed["Exit_status"], removed["comment"]) == (91, 1, "Subjob finished")
    done = any_pbs.ended("qdel", waiting.split("[")[0])
    assert (done.returncode, done.stderr) == (153, f"qdel: Unknown Job Id {waiting.replace('[]', '')}\n")


def test_what_the_owner_may_change(pbs_lab: PbsLab) -> None:
    full = pbs_lab.submit("-l", "select=3:ncpus=4,place=scatter", "--", "/bin/sleep", "600")
    pbs_lab.wait_for(full, "R")
    first, second = (pbs_lab.submit("-q", "low", *ONE, "--", "/bin/true") for _ in "ab")
    pbs_lab.run("qorder", first, second)
    listed = [line.split()[0] for line in pbs_lab.run("qstat").splitlines()[2:]]
    assert listed == [full, second, first]
    assert pbs_lab.ended("qorder", full, first).returncode == 168
    pbs_lab.run("qalter", "-l", "select=2:ncpus=4", "-l", "walltime=00:30:00", "-N", "renamed", "-r", "n", first)
    pbs_lab.run("qalter", "-p", "100", "-o", "moved.txt", first)
    seen = pbs_lab.job(first)
    assert (seen["Job_Name"], seen["Rerunable"], seen["Priority"]) == ("renamed", "False", 100)
    assert seen["Resource_List"]["select"] == "2:ncpus=4"
    assert seen["Resource_List"]["walltime"] == "00:30:00"
    assert seen["Output_Path"].endswith("/moved.txt")
    pbs_lab.run("qmove", "workq", first)
    assert pbs_lab.job(first)["queue"] == "workq"
    pbs_lab.run("qhold", first)
    assert (pbs_lab.job(first)["job_state"], pbs_lab.job(first)["Hold_Types"]) == ("H", "u")
    pbs_lab.run("qrls", first)
    wait_for(lambda: pbs_lab.job(first)["job_state"] == "Q")
    pbs_lab.run("qalter", "-W", f"depend=afterok:{full}", second)
    assert (pbs_lab.job(second)["job_state"], pbs_lab.job(second)["Hold_Types"]) == ("H", "s")


def test_what_the_owner_may_not(pbs_lab: PbsLab) -> None:
    """From errors/other-commands.txt: job 0 has ended, job 1 runs."""
    pbs_lab.wait_for(pbs_lab.submit("--", "/bin/true"), "F")
    pbs_lab.wait_for(pbs_lab.submit("--", "/bin/sleep", "600"), "R")
    refused = {
        "qdel 999999": (153, "qdel: Unknown Job Id 999999.pbshead"),
        "qdel nonsense": (1, "qdel: illegally formed job identifier: nonsense"),
        "qdel 0": (35, "qdel: Job has finished 0.pbshead"),
        "qdel -W force 999999": (153, "qdel: Unknown Job Id 999999.pbshead"),
        "qhold 999999": (153, "qhold: Unknown Job Id 999999.pbshead"),
        "qrerun 1": (159, "qrerun: Unauthorized Request  1.pbshead"),
        "qrerun 999999": (153, "qrerun: Unknown Job Id 999999.pbshead"),
        "qsig -s SIGNOPE 1": (165, "qsig: Unknown/illegal signal name 1.pbshead"),
        "qsig -s suspend 1": (159, "qsig: Unauthorized Request  1.pbshead"),
        "qsig -s 0 1": (0, ""),
        "qhold 1": (0, ""),
        "qrls 1": (0, ""),
        "qalter -p 500 1": (0, ""),
        "qalter -l walltime=00:01:00 1": (0, ""),
        "qalter -l select=2:ncpus=1 1": (
            167,
            "qalter: Cannot modify attribute while job running  Resource_List.select 1.pbshead",
        ),
        "qmove high 1": (168, "qmove: Request invalid for state of job 1.pbshead"),
        "qmgr -c 'set queue low priority = 3'": (
            159,
            "qmgr obj=low svr=default: Unauthorized Request \nqmgr: Error (15007) returned from server",
        ),
        "pbsnodes -o pbsn1": (1, "Error marking node pbsn1 - Unauthorized Request "),
        "pbsnodes nosuch": (1, "Node: nosuch,  Error: Unknown node "),
        "qstat -Q nosuch": (170, "qstat: Unknown queue nosuch"),
        "qdel -x 0": (0, ""),
        "qstat -x 0": (153, "qstat: Unknown Job Id 0.pbshead"),
    }
    answers = {command: pbs_lab.ended("/bin/bash", "-c", command) for command in refused}
    assert {command: (done.returncode, done.stderr.rstrip("\n")) for command, done in answers.items()} == refused


def test_force_leaves_no_grace(pbs_lab: PbsLab) -> None:
    script = "trap 'touch caught' TERM\ntouch up; while :; do sleep 0.05; done\n"
    job = pbs_lab.submit(script=script)
    wait_for((pbs_lab.home / "up").exists)
    pbs_lab.run("qdel", "-W", "force", job)
    assert pbs_lab.wait_for(job, "F")["Exit_status"] == 265
    assert not (pbs_lab.home / "caught").exists()


def test_suspend_and_resume_by_a_manager(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit("--", "/bin/sleep", "600")
    wait_for(lambda: pbs_lab.job(job)["substate"] == 42)
    pbs_lab.run("qsig", "-s", "suspend", job, manager=True)
    assert (pbs_lab.job(job)["job_state"], pbs_lab.job(job)["substate"]) == ("S", 43)
    pbs_lab.run("qsig", "-s", "resume", job, manager=True)
    assert (pbs_lab.job(job)["job_state"], pbs_lab.job(job)["substate"]) == ("R", 42)
    pbs_lab.run("qdel", job)
