"""qstat, pbsnodes and qmgr of the stand-in show what the recorded PBS showed: attributes, order, states, comments."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.labs.pbs_lab import Job, PbsLab
from tests.labs.pbs_recorded import recorded, recorded_job, recorded_jobs, recorded_names
from tests.wait import wait_for

STATE = ("job_state", "substate", "Hold_Types", "run_count", "Exit_status", "Resource_List", "exec_host", "exec_vnode")
WHOLE = ["-l", "select=3:ncpus=4:ngpus=4,place=scatter"]
WAITS = "while [ ! -e go ]; do sleep 0.05; done"
ONE = ["-l", "select=1:ncpus=1"]


def assert_as_recorded(name: str, job: Job) -> None:
    """Check that the attributes, their order, and all values that can be equal are as recorded."""
    wanted = recorded_job(name)
    job = {key: recorded_names(value) if isinstance(value, str) else value for key, value in job.items()}
    assert names(job) == names(wanted)
    assert {key: job[key] for key in STATE if key in job} == {key: wanted[key] for key in STATE if key in wanted}
    assert without_dates(job.get("comment")) == without_dates(wanted.get("comment"))


def names(job: Job) -> list[str]:
    """Return all names except the session, which the recorded server did not know of jobs that took only a second."""
    return [name for name in job if name != "session_id"]


def without_dates(comment: str | None) -> str:
    text = re.sub(r"\w{3} \w{3} +\d+ at \d\d:\d\d", "DATE", comment or "")
    return re.sub(r"by \w+@", "by USER@", text)


def table(lab: PbsLab, job_id: str, *options: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(lab.run("qstat", "-f", "-F", "json", *options, job_id))["Jobs"][job_id]
    return answer


def test_jobs_that_run_wait_and_are_deleted(pbs_lab: PbsLab) -> None:
    gang = pbs_lab.submit(
        *("-q", "workq", "-N", "gang", "-l", "select=2:ncpus=2:ngpus=2:mpiprocs=2,place=scatter"),
        *("-l", "walltime=00:05:00", "-v", "A=1,B=two words", "--", "/bin/sleep", "600"),
    )
    big = pbs_lab.submit("-q", "low", *WHOLE, "--", "/bin/sleep", "1")
    never = pbs_lab.submit("-l", "select=1:ncpus=64", "--", "/bin/sleep", "1")
    many = pbs_lab.submit("-l", "select=9:ncpus=4:ngpus=4,place=scatter", "--", "/bin/sleep", "1")
    held = pbs_lab.submit("-h", "--", "/bin/sleep", "1")
    later = pbs_lab.submit("-a", "203011201044", "--", "/bin/sleep", "1")
    child = pbs_lab.submit("-W", f"depend=afterok:{gang}", "--", "/bin/sleep", "1")
    wait_for(lambda: pbs_lab.job(gang)["substate"] == 42)
    assert_as_recorded("running-with-dependents", table(pbs_lab, gang))
    time_goes_on: Job = {"resources_used": {}}
    assert table(pbs_lab, gang) | time_goes_on == pbs_lab.job(gang) | time_goes_on
    assert_as_recorded("queued-insufficient", pbs_lab.job(big))
    assert_as_recorded("queued-can-never-run", pbs_lab.job(never))
    assert_as_recorded("queued-too-many-chunks", pbs_lab.job(many))
    assert_as_recorded("held-user", pbs_lab.job(held))
    assert_as_recorded("waiting-until", pbs_lab.job(later))
    assert_as_recorded("held-depend-afterok", pbs_lab.job(child))
    assert pbs_lab.job(gang)["Variable_List"]["A"] == 1
    pbs_lab.run("qdel", gang, never)
    assert_as_recorded("finished-qdel", pbs_lab.wait_for(gang, "F"))
    assert_as_recorded("finished-never-ran-qdel", pbs_lab.job(never))
    assert_as_recorded("dependent-after-failed-parent", pbs_lab.wait_for(child, "F"))
    assert_as_recorded("finished-ok", pbs_lab.wait_for(big, "F"))


def test_an_array_and_its_subjobs(pbs_lab: PbsLab) -> None:
    busy = pbs_lab.submit(*ONE, "--", "/bin/sleep", "600")
    parent = pbs_lab.submit("-J", "0-7%2", "-N", "arr", *ONE, "--", "/bin/sh", "-c", WAITS)
    first, last = parent.replace("[]", "[0]"), parent.replace("[]", "[7]")
    wait_for(lambda: pbs_lab.job(first).get("substate") == 42)
    wanted = recorded_job("array-one-subjob")
    seen = table(pbs_lab, first)
    assert list(seen) == list(wanted)
    assert seen["array_index"] == 0
    assert_as_recorded("array-parent", table(pbs_lab, parent))
    assert list(table(pbs_lab, last)) == list(recorded_job("array-one-queued-subjob"))
    (pbs_lab.home / "go").touch()
    expired = pbs_lab.wait_for(first, "X")
    assert list(expired) == list(recorded_job("array-expired-subjob"))
    assert_as_recorded("array-parent-finished", pbs_lab.wait_for(parent, "F"))
    assert len(json.loads(pbs_lab.run("qstat", "-x", "-t", "-f", "-F", "json", parent))["Jobs"]) == 9
    pbs_lab.run("qdel", busy)


NOT_SHOWN = {
    "unknown": ("qstat -f -F json 999999", 153),
    "malformed-id": ("qstat -f -F json nonsense", 170),
    "finished-without-x": ("qstat -f -F json 0", 35),
    "several-ids-one-unknown": ("qstat -f -F json 1.pbshead 999999 1", 153),
}


def test_ids_that_it_cannot_show(pbs_lab: PbsLab) -> None:
    pbs_lab.wait_for(pbs_lab.submit("--", "/bin/true"), "F")
    pbs_lab.submit("--", "/bin/sleep", "600")
    for recording, (command, code) in NOT_SHOWN.items():
        done = pbs_lab.ended(*command.split())
        assert (done.returncode, done.stderr) == (code, recorded(f"qstat/{recording}.json.err"))
        assert ("Jobs" in json.loads(done.stdout)) == (recording == "several-ids-one-unknown")


def test_json_has_the_first_of_several_ids_and_with_express_all_that_are_known(pbs_lab: PbsLab) -> None:
    first, second = [pbs_lab.submit("--", "/bin/sleep", "600") for _ in range(2)]

    def answered(*words: str) -> tuple[list[str], int, str]:
        done = pbs_lab.ended("qstat", "-f", "-F", "json", *words)
        return list(json.loads(done.stdout or "{}").get("Jobs", {})), done.returncode, done.stderr

    unknown = recorded("qstat/unknown.json.err")
    assert list(recorded_jobs("several-ids-one-unknown")) == ["47.pbshead"]
    assert answered(first, "999999", second) == ([first], 153, unknown)
    assert answered("999999", second, first) == ([second], 153, unknown)
    assert answered(second, first) == ([second], 0, "")
    assert answered("-E", second, "999999", first) == ([first, second], 0, "")
    assert answered("-E", "999998", "999999") == ([], 153, unknown)
    assert answered("-E", "nonsense")[:2] == ([], 1)
    for job in (first, second):
        assert f"Job Id: {job}" in pbs_lab.run("qstat", "-f", first, second)


def test_express_shows_no_job_where_the_last_id_is_of_a_server_that_nobody_knows(pbs_lab: PbsLab) -> None:
    """qstat sorts the IDs by their servers first."""
    running = pbs_lab.submit("--", "/bin/sleep", "600")
    recording = "several-ids-other-server-express"
    done = pbs_lab.ended("qstat", "-f", "-F", "json", "-E", "999999.pbsother", running)
    assert (done.returncode, done.stderr) == (1, recorded(f"qstat/{recording}.json.err"))
    assert json.loads(done.stdout).keys() == json.loads(recorded(f"qstat/{recording}.json")).keys()
    done = pbs_lab.ended("qstat", "-f", "-F", "json", "-E", "999999.another", running)
    assert (done.returncode, list(json.loads(done.stdout)["Jobs"])) == (1, [running])


def test_text_and_dsv_are_the_same_attributes(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit(
        *("-q", "workq", "-N", "gang", "-l", "select=2:ncpus=2:ngpus=2:mpiprocs=2,place=scatter"),
        *("-l", "walltime=00:05:00", "-v", "A=1,B=two words", "--", "/bin/sleep", "600"),
    )
    wait_for(lambda: pbs_lab.job(job)["substate"] == 42)
    names = re.findall(r"^    ([\w.]+) = ", pbs_lab.run("qstat", "-f", job), re.MULTILINE)
    assert names == re.findall(r"^    ([\w.]+) = ", recorded("qstat/running.txt"), re.MULTILINE)
    dsv = [part.split("=")[0] for part in pbs_lab.run("qstat", "-f", "-F", "dsv", job).split("|")]
    assert dsv[1:] == [part.split("=")[0] for part in recorded("qstat/running.dsv").split("|")][1:]
    assert pbs_lab.run("qstat").splitlines()[:2] == recorded("qstat/list-plain.txt").splitlines()[:2]


def test_queues_server_and_nodes(pbs_lab: PbsLab) -> None:
    pbs_lab.submit("-l", "select=2:ncpus=2:ngpus=2:mpiprocs=2,place=scatter", "--", "/bin/sleep", "600")
    pbs_lab.submit("-l", "select=1:ncpus=2", "--", "/bin/sleep", "600")
    wait_for(lambda: "job-busy" in pbs_lab.run("pbsnodes", "-a"))

    def answers(command: str, recording: str, section: str) -> tuple[Any, Any]:
        now = json.loads(pbs_lab.run(*command.split()))[section]
        then = json.loads(recorded(f"qstat/{recording}.json"))[section]
        return now, then

    now, then = answers("qstat -Q -f -F json", "queues", "Queue")
    assert {name: list(queue) for name, queue in now.items()} == {name: list(queue) for name, queue in then.items()}
    assert (now["low"]["Priority"], now["high"]["Priority"]) == (50, 200)
    now, then = answers("qstat -B -f -F json", "server", "Server")
    assert list(now["pbshead"]) == list(then["pbshead"])
    now, then = answers("pbsnodes -av -F json", "pbsnodes", "nodes")
    assert [list(node) for node in now.values()] == [list(node) for node in then.values()]
    assert [node["state"] for node in now.values()] == [node["state"] for node in then.values()]


def test_what_the_site_has_set(pbs_lab: PbsLab) -> None:
    assert pbs_lab.run("qmgr", "-c", "list sched").split() == recorded("misc/site-settings-qmgr-list-sched.txt").split()
    lines = set(pbs_lab.run("qmgr", "-c", "print server").splitlines())
    missing = set(recorded("misc/site-settings-qmgr-print-server.txt").splitlines()) - lines
    assert {line for line in missing if not line.startswith("#")} == {"set server node_fail_requeue = 310"}
