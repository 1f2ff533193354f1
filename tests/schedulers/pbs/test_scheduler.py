"""PBS: parsing of answers recorded on OpenPBS 23.06, and the flags for a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobArray
from hpc_det.requeue import Cause
from hpc_det.schedulers.pbs.answers import IDS_AT_ONCE, NAMES_AT_ONCE
from hpc_det.schedulers.pbs.hosts import named_hosts
from hpc_det.schedulers.pbs.scheduler import Pbs, directives
from hpc_det.schedulers.scheduler import CommandError, JobState, NoAnswer, Run, Submission, array_of, run_command
from hpc_det.submit.render import render
from tests.facts import refused, unnamed
from tests.labs.pbs_lab import PbsLab
from tests.plan.plans import job_plan
from tests.stub import Stub

RECORDED = Path(__file__).parent / "recorded"
SCRIPT = Path("/home/ada/hpc_det/experiments/12/jobs/1.sh")
VERSION = "pbs_version = 23.06.06\n"
MORNING = datetime(2026, 11, 20, 8, 44, 42).timestamp()
"""Start of the recorded job 47, which has a limit of 5 min."""


def said(name: str) -> str:
    return (RECORDED / f"{name}.json").read_text()


def answers(name: str, exit_code: int = 0) -> Run:
    """Return a `run` that returns the recorded answer, or raises its error, as run_command does."""

    def run(command: Sequence[str]) -> str:
        if exit_code:
            raise CommandError(
                f"qstat: refused with exit code {exit_code}: {(RECORDED / f'{name}.json.err').read_text().strip()}",
                said(name),
            )
        return said(name)

    return run


def changed(name: str, **attributes: Any) -> Run:
    """Return a `run` that returns the recorded answer about one job, with these attributes changed."""
    answer = json.loads(said(name))
    (job,) = answer["Jobs"].values()
    job.update(attributes)
    return lambda command: json.dumps(answer)


def absent(command: Sequence[str]) -> str:
    raise CommandError("qstat: not found on PATH")


# --- states


@pytest.mark.parametrize(
    ("name", "job_id", "state", "reason"),
    [
        ("running", "47.pbshead", JobState.RUNNING, "Job run at Fri Nov 20"),
        ("queued-insufficient", "48.pbshead", JobState.QUEUED, "Not Running: Insufficient amount of resource: ncpus"),
        ("queued-can-never-run", "49.pbshead", JobState.QUEUED, "Can Never Run: Insufficient amount of resource"),
        (
            "held-user",
            "51.pbshead",
            JobState.QUEUED,
            "hpc-det job release 51.pbshead",
        ),
        ("waiting-until", "52.pbshead", JobState.QUEUED, "time"),
        ("held-depend-afterok", "53.pbshead", JobState.QUEUED, "47.pbshead"),
        ("array-later-some-expired", "54[0].pbshead", JobState.ENDED, "Job run at Fri Nov 20"),
        ("array-later-some-expired", "54[2].pbshead", JobState.RUNNING, "Job run at Fri Nov 20"),
        ("array-later-some-expired", "54[7].pbshead", JobState.QUEUED, "Job Array Began"),
        ("array-later-some-expired", "54[].pbshead", JobState.RUNNING, "Job Array Began"),
        ("preempt-requeue-1-after2s", "126.pbshead", JobState.RUNNING, "Job run at"),
        ("preempt-requeue-2-high-running", "126.pbshead", JobState.QUEUED, "Not Running: Not enough free nodes"),
        ("preempt-suspend-2-high-running", "130.pbshead", JobState.RUNNING, "Not Running: Not enough free nodes"),
    ],
)
def test_what_qstat_says_is_one_of_our_states_with_its_comment(
    name: str, job_id: str, state: JobState, reason: str
) -> None:
    found = Pbs().status([job_id], answers(name))[job_id]
    assert found.state is state
    assert not unnamed(found.reason, reason)
    assert found.is_suspended is ("suspend" in name)


@pytest.mark.parametrize(
    ("holds", "depend", "held_by", "command"),
    [
        ("u", "", "user", "hpc-det job release 51.pbshead"),
        ("u", "beforeok:53.pbshead@pbshead", "user", "hpc-det job release 51.pbshead"),
        ("us", "afterany:47.pbshead@pbshead", "user", "hpc-det job release 51.pbshead"),
        ("o", "", "operator", "qrls -h o 51.pbshead"),
        ("s", "", "manager", "qrls -h s 51.pbshead"),
        ("s", "afterok:47.pbshead@pbshead:48.pbshead@pbshead", "47.pbshead, 48.pbshead", ""),
    ],
)
def test_a_held_job_is_held_by_somebody_whatever_its_former_comment(
    holds: str, depend: str, held_by: str, command: str
) -> None:
    run = changed("held-user", Hold_Types=holds, depend=depend, comment="Not Running: Not enough free nodes available")
    reason = Pbs().status(["51.pbshead"], run)["51.pbshead"].reason
    assert held_by in reason
    assert f"`{command}`" in reason or not command
    assert "Not enough free nodes" not in reason


def test_a_job_that_was_requeued_held_keeps_the_comment_of_pbs_where_nobody_holds_it() -> None:
    run = changed("held-user", Hold_Types="n", comment="job held, too many failed attempts to run")
    assert Pbs().status(["51.pbshead"], run)["51.pbshead"].reason == "job held, too many failed attempts to run"


def test_an_array_of_which_no_element_runs_is_queued() -> None:
    run = changed("array-parent", array_state_count="Queued:5 Running:0 Exiting:0 Expired:3 ")
    assert Pbs().status(["54[].pbshead"], run)["54[].pbshead"].state is JobState.QUEUED


def test_a_state_from_a_newer_pbs_is_unknown_and_no_crash() -> None:
    assert Pbs().status(["47.pbshead"], changed("running", job_state="Y"))["47.pbshead"].state is JobState.UNKNOWN


class Qstat:
    """Answers like qstat about several jobs: in JSON, all known ones with -E, only the first one without it."""

    def __init__(self, *known: str, forbidden: str = "") -> None:
        self._known = known
        self._forbidden = forbidden
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.commands.append(list(command))
        ids = [word for word in command if word[0].isdigit()]
        known = [job_id for job_id in ids if job_id in self._known]
        unknown = [job_id for job_id in ids if job_id not in (*known, self._forbidden)]
        output = json.dumps({"Jobs": {job_id: {"job_state": "R"} for job_id in known}} if known else {})
        if "-E" in command:
            unknown = [] if len(unknown) < len(ids) else unknown[-1:]
        else:
            output = json.dumps({"Jobs": {job_id: {"job_state": "R"} for job_id in known[:1]}} if known else {})
        if unknown:
            said = "; ".join(f"qstat: Unknown Job Id {job_id}" for job_id in unknown)
            raise CommandError(f"qstat: refused with exit code 153: {said}", output)
        return output


def states_of(run: Run, *job_ids: str) -> list[JobState]:
    found = Pbs().status(job_ids, run)
    return [found[job_id].state for job_id in job_ids]


def test_each_of_several_jobs_is_answered() -> None:
    qstat = Qstat("47.pbshead", "48.pbshead", "49.pbshead")
    assert states_of(qstat, "47.pbshead", "48.pbshead", "49.pbshead") == [JobState.RUNNING] * 3
    assert len(qstat.commands) == 1


@pytest.mark.parametrize("ended", ["46.pbshead", "999999.pbshead"])
def test_jobs_that_qstat_leaves_out_are_asked_about_by_name(ended: str) -> None:
    qstat = Qstat("47.pbshead", "48.pbshead")
    asked = states_of(qstat, "47.pbshead", ended, "48.pbshead")
    assert asked == [JobState.RUNNING, JobState.ENDED, JobState.RUNNING]
    assert qstat.commands[1] == ["qstat", "-f", "-F", "json", ended]


def test_several_jobs_of_a_site_are_each_what_they_are(pbs_lab: PbsLab) -> None:
    ended = pbs_lab.submit("--", "/bin/true")
    pbs_lab.wait_for(ended, "F")
    running, held = pbs_lab.submit("--", "/bin/sleep", "600"), pbs_lab.submit("-h", "--", "/bin/sleep", "600")
    pbs_lab.wait_for(running, "R")
    assert states_of(run_command, "999999.pbshead", ended, running, held) == [
        *[JobState.ENDED] * 2,
        JobState.RUNNING,
        JobState.QUEUED,
    ]


def test_a_job_of_a_server_that_cannot_be_reached_hides_no_other_job(pbs_lab: PbsLab) -> None:
    running = pbs_lab.submit("--", "/bin/sleep", "600")
    pbs_lab.wait_for(running, "R")
    assert states_of(run_command, running, "999999.pbsother") == [JobState.RUNNING, JobState.UNKNOWN]


def test_jobs_that_qstat_has_to_name_one_by_one_are_asked_about_in_small_groups() -> None:
    ids = [f"{number}.pbshead" for number in range(IDS_AT_ONCE)]
    qstat = Qstat(ids[0])
    assert states_of(qstat, *ids) == [JobState.RUNNING, *[JobState.ENDED] * (len(ids) - 1)]
    named = [len(command) - 4 for command in qstat.commands[1:]]
    assert max(named) == NAMES_AT_ONCE
    assert sum(named) == len(ids) - 1


def test_a_server_that_answers_no_more_is_asked_no_further() -> None:
    ids, qstat, asked = [f"{number}.pbshead" for number in range(IDS_AT_ONCE)], Qstat("0.pbshead"), list[str]()

    def run(command: Sequence[str]) -> str:
        if "-E" in command:
            return qstat(command)
        asked.append(command[-1])
        raise CommandError("qstat: no answer in 60 s; try again later")

    assert states_of(run, *ids) == [JobState.RUNNING, *[JobState.UNKNOWN] * (len(ids) - 1)]
    assert len(asked) == 1


def test_jobs_that_get_no_answer_in_time_are_no_news_with_that_reason() -> None:
    qstat = Qstat()

    def run(command: Sequence[str]) -> str:
        if "-E" in command:
            return qstat(command)
        raise CommandError("qstat: no answer in 60 s; try again later")

    found = Pbs().status(["1.pbshead", "2.pbshead"], run)
    assert found["2.pbshead"].state is JobState.ENDED
    assert found["1.pbshead"].state is JobState.UNKNOWN
    assert not unnamed(found["1.pbshead"].reason, "60 s")


def test_where_all_have_ended_each_is_named() -> None:
    assert states_of(Qstat(), "1.pbshead", "2.pbshead", "3.pbshead") == [JobState.ENDED] * 3


def test_a_job_that_this_user_may_not_see_is_no_news_and_no_end() -> None:
    qstat = Qstat("47.pbshead", forbidden="48.pbshead")
    assert states_of(qstat, "48.pbshead", "47.pbshead") == [JobState.UNKNOWN, JobState.RUNNING]
    assert states_of(qstat, "48.pbshead", "1.pbshead") == [JobState.UNKNOWN, JobState.ENDED]


def test_no_news_of_a_job_names_no_other_job() -> None:
    said = "qstat: refused with exit code 159: qstat: Unauthorized Request  48.pbshead; cannot connect to 10.0.0.1"

    def run(command: Sequence[str]) -> str:
        raise CommandError(said)

    found = Pbs().status(["47.pbshead", "48.pbshead"], run)
    assert "48.pbshead" in found["48.pbshead"].reason
    assert found["47.pbshead"].reason == "cannot connect to 10.0.0.1"


def test_an_id_is_not_another_that_begins_with_it() -> None:
    assert states_of(Qstat("4.pbshead"), "4.pbshead", "47.pbshead") == [JobState.RUNNING, JobState.ENDED]


@pytest.mark.parametrize(
    ("name", "job_id", "exit_code", "state"),
    [
        ("unknown", "999999.pbshead", 153, JobState.ENDED),
        ("finished-without-x", "0.pbshead", 35, JobState.ENDED),
        ("malformed-id", "nonsense", 170, JobState.UNKNOWN),
    ],
)
def test_a_job_has_ended_only_where_qstat_names_it(name: str, job_id: str, exit_code: int, state: JobState) -> None:
    assert Pbs().status([job_id], answers(name, exit_code))[job_id].state is state


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        "echo 'Connection refused' >&2; echo 'qstat: cannot connect to server pbshead (errno=15010)' >&2; exit 255",
        'echo \'{"timestamp": 1, "pbs_server": "pbshead"}\'',  # an answer without jobs
        "echo '<Data></Data>'",
        "kill -9 $$",
    ],
)
def test_a_qstat_that_fails_is_no_news_of_any_job(stub: Stub, text: str) -> None:
    stub("qstat", text)
    found = Pbs().status(["7.pbshead", "8.pbshead"], run_command)
    assert [found[job_id].state for job_id in found] == [JobState.UNKNOWN] * 2
    assert "qstat" in found["7.pbshead"].reason


def test_jobs_are_asked_for_together_and_not_too_many_at_once() -> None:
    asked: list[int] = []

    def run(command: Sequence[str]) -> str:
        asked.append(len(command) - 5)
        return json.dumps({"Jobs": {job_id: {"job_state": "R"} for job_id in command[5:]}})

    Pbs().status([f"{number}.pbshead" for number in range(2 * IDS_AT_ONCE + 1)], run)
    assert asked == [IDS_AT_ONCE, IDS_AT_ONCE, 1]


# --- ids


@pytest.mark.parametrize("job_id", ["47.pbshead", "54[].pbshead", "54[3].pbs.site.org"])
def test_qsubs_answer_holds_the_id(job_id: str) -> None:
    assert Pbs().parse_submit(f"qsub: a hook says hello\n{job_id}\n") == job_id


@pytest.mark.parametrize("answer", ["", "4711", "qsub: Unknown queue", "47.a\n48.a"])
def test_an_answer_without_an_id_is_an_error_that_quotes_it(answer: str) -> None:
    with refused(ValueError, repr(answer)):
        Pbs().parse_submit(answer)


def test_an_element_belongs_to_its_array() -> None:
    assert [array_of(job_id) for job_id in ("54[3].pbshead", "47.pbshead", "12_3")] == [
        "54[].pbshead",
        "47.pbshead",
        "12",
    ]


def test_an_element_knows_its_place_also_where_it_was_submitted_alone() -> None:
    assert Pbs().array_index({"PBS_ARRAY_INDEX": "7"}) == 7
    assert Pbs().array_index({"HPC_DET_INDEX": "3"}) == 3
    assert Pbs().array_index({}) == 0


# --- commands


@pytest.mark.integration
def test_a_job_that_is_gone_needs_no_cancelling(stub: Stub) -> None:
    stub("qdel", "echo 'qdel: Job has finished 0.pbshead' >&2; exit 35")
    Pbs().cancel("0.pbshead", run_command)
    stub("qdel", "echo 'qdel: Unknown Job Id 0.pbshead' >&2; exit 153")
    Pbs().cancel("0.pbshead", run_command)


@pytest.mark.integration
def test_a_refused_qdel_is_an_error(stub: Stub) -> None:
    stub("qdel", 'echo "Couldn\'t connect to cluster: pbshead" >&2; exit 162')
    with refused(CommandError, "qdel", 162, "pbshead"):
        Pbs().cancel("0.pbshead", run_command)


class Recorder:
    """Answers the commands in `answers`, and records all others."""

    def __init__(self, **answers: str) -> None:
        self._answers = answers
        self.ran: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        if command[0] not in self._answers:
            self.ran.append(list(command))
        return self._answers.get(command[0], "")


def test_only_what_waits_is_withdrawn_from_the_queue() -> None:
    run = Recorder(qstat=said("array-later-some-expired"))
    Pbs().withdraw("54[].pbshead", run)
    assert run.ran == [["qdel", *(f"54[{index}].pbshead" for index in (4, 5, 6, 7))]]
    run = Recorder(qstat=said("held-depend-afterok"))
    Pbs().withdraw("53.pbshead", run)
    assert run.ran == [["qdel", "53.pbshead"]]
    run = Recorder(qstat=said("running"))
    Pbs().withdraw("47.pbshead", run)
    assert run.ran == []


def test_an_element_that_has_just_ended_keeps_none_of_the_others_in_the_queue() -> None:
    array = {"job_state": "B", "array_state_count": "Queued:450 Running:0 Exiting:0 Expired:0 "}
    elements = {f"54[{index}].pbshead": {"job_state": "Q"} for index in range(450)}
    withdrawn: list[str] = []

    def run(command: Sequence[str]) -> str:
        if command[0] == "qstat":
            return json.dumps({"Jobs": {"54[].pbshead": array, **elements}})
        withdrawn.extend(command[1:])
        if "54[7].pbshead" in command:
            raise CommandError("qdel: refused with exit code 35: qdel: Job has finished 54[7].pbshead")
        return ""

    Pbs().withdraw("54[].pbshead", run)
    assert withdrawn == [*elements]


def test_what_is_gone_needs_no_withdrawing() -> None:
    Pbs().withdraw("999999.pbshead", answers("unknown", 153))
    with refused(CommandError, "qstat"):
        Pbs().withdraw("47.pbshead", absent)


def test_a_job_that_waits_is_moved_away_from_a_node() -> None:
    select = {"Resource_List": {"select": "1:ncpus=2:host=pbsn2+1:ncpus=2:host=pbsn3"}}
    qstat = changed("queued-insufficient", **select)([])
    run = Recorder(qstat=qstat, pbsnodes=said("pbsnodes-one-down"))
    Pbs().avoid("48.pbshead", ["pbsn3"], run)
    named = "1:ncpus=2:host=pbsn2+1:ncpus=2:host=pbsn1"
    assert run.ran == [["qalter", "-l", f"select={named}", "48.pbshead"]]
    Pbs().avoid("48.pbshead", [], absent)


def test_a_job_keeps_its_nodes_where_pbs_cannot_be_asked_about_others() -> None:
    select = {"Resource_List": {"select": "1:ncpus=2:host=pbsn2+1:ncpus=2:host=pbsn3"}}
    answers = Recorder(qstat=changed("queued-insufficient", **select)([]))

    def run(command: Sequence[str]) -> str:
        return absent(command) if command[0] == "pbsnodes" else answers(command)

    with refused(CommandError, "qstat"):
        Pbs().avoid("48.pbshead", ["pbsn3"], run)
    assert answers.ran == []


def test_a_job_does_not_wait_for_a_node_that_was_named_for_it_and_is_lost_now(pbs_lab: PbsLab) -> None:
    first, second, third = pbs_lab.nodes
    named = "+".join(f"1:ncpus=2:host={host}" for host in (first, third))
    job = pbs_lab.submit("-h", "-l", f"select={named}", "-l", "place=scatter", "--", "/bin/sleep", "600")
    pbs_lab.fail_node(third)
    with refused(CommandError, 2, 1, third):
        Pbs().avoid(job, [second, third], run_command)
    pbs_lab.run("qrls", job)
    hosts = {chunk.partition("/")[0] for chunk in pbs_lab.wait_for(job, "R")["exec_host"].split("+")}
    assert hosts == {first, second}


def test_nobody_can_requeue_a_job_of_their_own() -> None:
    with refused(CommandError, "resume", "successor", "resubmit", "chain"):
        Pbs().requeue("47.pbshead", {}, answers("running"))


@pytest.mark.parametrize("name", ["preempt-requeue-1-after2s", "preempt-requeue-2-high-running"])
def test_a_job_that_pbs_itself_requeues_is_on_its_way(name: str) -> None:
    Pbs().requeue("126.pbshead", {}, answers(name))


# --- why was the job signalled, and when will it end?


def cause(run: Run, job_id: str, signalled_at: float = MORNING + 60, **plan: Any) -> Cause:
    return Pbs().stop_cause(job_plan(**plan), {"PBS_JOBID": job_id}, signalled_at, run)


def test_a_job_on_its_way_back_into_the_queue_was_preempted() -> None:
    assert cause(answers("preempt-requeue-1-after2s"), "126.pbshead") is Cause.PREEMPTED


def test_a_job_that_the_scheduler_deletes_was_preempted() -> None:
    assert cause(answers("preempt-delete-1-after2s"), "134.pbshead") is Cause.PREEMPTED


def test_a_job_that_somebody_deletes_was_cancelled() -> None:
    run = changed("running", comment="Job run at ... on (pbsn1:ncpus=2) and terminated by alice@pbslogin")
    assert cause(run, "47.pbshead") is Cause.CANCELLED


def test_a_signal_at_the_limit_or_later_is_the_limits() -> None:
    assert cause(answers("running"), "47.pbshead", MORNING + 299) is Cause.TIME_LIMIT
    assert cause(answers("running"), "47.pbshead", MORNING + 240) is Cause.PREEMPTED
    assert cause(changed("running", substate=60), "47.pbshead", MORNING + 300) is Cause.PREEMPTED


def test_the_end_is_the_start_and_the_limit() -> None:
    assert Pbs().ends_at(job_plan(), {"PBS_JOBID": "47.pbshead"}, answers("running")) == MORNING + 300


def test_a_job_without_a_limit_has_no_end() -> None:
    run = changed("running", Resource_List={"ncpus": 4})
    assert Pbs().ends_at(job_plan(), {"PBS_JOBID": "47.pbshead"}, run) is None


def test_without_qstat_the_clock_of_the_job_counts(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.touch()
    os.utime(nodes, (MORNING, MORNING))
    env = {"PBS_JOBID": "47.pbshead", "PBS_NODEFILE": str(nodes)}
    assert Pbs().ends_at(job_plan(time_limit_min=5), env, absent) == MORNING + 300
    assert Pbs().stop_cause(job_plan(time_limit_min=5), env, MORNING + 301, absent) is Cause.TIME_LIMIT
    assert Pbs().stop_cause(job_plan(), env, MORNING + 301, absent) is Cause.PREEMPTED


# --- flags


def flags(**changes: Any) -> list[str]:
    return directives(job_plan(scheduler="pbs", **changes), SCRIPT)


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({}, "2:ncpus=12:ngpus=4:mpiprocs=1:ompthreads=3"),
        ({"gpu_type": "a100"}, "2:ncpus=12:ngpus=4:gpu_type=a100:mpiprocs=1:ompthreads=3"),
        ({"slot_type": "cpu", "gpu_type": "a100"}, "2:ncpus=12:mpiprocs=1:ompthreads=3"),
        ({"mem_per_node": "16G"}, "2:ncpus=12:ngpus=4:mpiprocs=1:ompthreads=3:mem=16gb"),
        ({"mem_per_node": "500"}, "2:ncpus=12:ngpus=4:mpiprocs=1:ompthreads=3:mem=500mb"),
    ],
)
def test_a_node_is_a_chunk_with_one_line_in_the_list_of_nodes(changes: dict[str, str], chunk: str) -> None:
    assert f"-l select={chunk}" in flags(**changes)


@pytest.mark.parametrize(("minutes", "text"), [(1, "00:01:00"), (90, "01:30:00"), (2880, "48:00:00")])
def test_a_time_limit_has_hours_and_no_days(minutes: int, text: str) -> None:
    assert f"-l walltime={text}" in flags(time_limit_min=minutes)


def test_a_user_may_place_the_chunks() -> None:
    assert "-l place=scatter" in flags()
    assert "-l place=scatter" not in flags(submit_args=("-l", "place=scatter:excl"))


def test_a_folder_that_qsub_would_take_for_a_host_is_refused() -> None:
    with refused(UsageError, "HPC_DET_ROOT", "/home/a:b", "':'"):
        directives(job_plan(), Path("/home/a:b/jobs/1.sh"))


def test_texts_that_no_quotes_can_hold_are_refused_all_at_once() -> None:
    both = """a'b"c"""
    with pytest.raises(UsageError) as error:
        directives(job_plan(partition=both, account=both), Path(f"/home/{both}/jobs/1.sh"))
    names = ["resources.resource_pool", "account", "HPC_DET_ROOT"]
    assert [problem.partition(":")[0] for problem in str(error.value).splitlines()] == names


def submit(run: Run, **changes: Any) -> list[str]:
    """Return the words of the command line between qsub and the script."""
    array = JobArray(first=0, count=changes.pop("count", 1), at_once=changes.pop("at_once", None))
    return Pbs().submit_command(Submission(script="1.sh", array=array, **changes), run)[1:-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"after": "47.pbshead"}, ["-W", "depend=afterany:47.pbshead"]),
        ({"count": 8, "at_once": 2}, ["-J", "0-7%2"]),
        ({"count": 8, "index": 3}, ["-v", "HPC_DET_INDEX=3"]),
        ({"count": 8, "exclude": ("pbsn1",)}, ["-J", "0-7"]),
    ],
)
def test_what_only_one_submission_wants_stands_on_its_command_line(changes: dict[str, Any], words: list[str]) -> None:
    assert submit(lambda command: VERSION, **changes) == words


def test_what_follows_an_element_waits_for_its_time_as_pbs_knows_no_dependency_on_elements() -> None:
    now = datetime.now().timestamp()
    flag, when, *others = submit(lambda command: VERSION, count=8, index=3, after="54[3].pbshead")[2:]
    assert (flag, others) == ("-a", [])
    begins = datetime.strptime(when, "%Y%m%d%H%M.%S").timestamp()
    assert now + 29 < begins <= datetime.now().timestamp() + 30


@pytest.mark.parametrize("answer", ["Version: 6.1.2\nCommit: 661e092", "Unknown option: version", ""])
def test_torque_and_the_commands_that_slurm_brings_are_refused(answer: str) -> None:
    with refused(CommandError, "PBS Pro", "OpenPBS"):
        submit(lambda command: answer)


@pytest.mark.integration
def test_a_qstat_that_knows_no_version_is_refused_and_an_absent_one_is_said_to_be_absent(stub: Stub) -> None:
    with refused(CommandError, "qstat"):
        submit(absent)
    stub("qstat", "echo 'Unknown option: version' >&2; exit 2")
    with refused(CommandError, "PBS Pro", "OpenPBS"):
        submit(run_command)


@pytest.mark.integration
def test_a_server_that_cannot_be_reached_may_be_pbs_and_is_asked_again_later(stub: Stub) -> None:
    stub("qstat", "echo 'Connection refused' >&2; exit 255")
    with refused(NoAnswer, "qstat", 255, "Connection refused"):
        submit(run_command)


# --- nodes that are down, or excluded


def test_nodes_that_the_server_does_not_reach_are_down() -> None:
    nodes = answers("pbsnodes-one-down")
    assert Pbs().down_hosts(["pbsn1", "pbsn3.site.org", "pbsn9"], nodes) == ["pbsn3.site.org"]


def test_the_nodes_that_are_left_are_named_and_free_ones_first() -> None:
    """In the recording, pbsn1 is busy, pbsn2 is free and pbsn3 is down."""
    nodes = answers("pbsnodes-one-down")
    assert named_hosts(("1:ncpus=4:ngpus=4", None), ["pbsn9"], nodes) == "1:ncpus=4:ngpus=4:host=pbsn2"
    assert named_hosts(("2:ncpus=4:ngpus=4", None), ["pbsn3.site.org"], nodes) == (
        "1:ncpus=4:ngpus=4:host=pbsn2+1:ncpus=4:ngpus=4:host=pbsn1"
    )
    assert named_hosts(("1:ncpus=2:mem=8gb", "low"), ["pbsn2"], nodes) == "1:ncpus=2:mem=8gb:host=pbsn1"


def test_nodes_are_named_that_have_the_resources_of_the_constraint() -> None:
    nodes = {
        "a": {"state": "free", "resources_available": {"ncpus": 4, "nvlink": "False", "cpu_type": "milan"}},
        "b": {"state": "free", "resources_available": {"ncpus": 4, "nvlink": "True", "cpu_type": "rome,milan"}},
        "c": {"state": "free", "resources_available": {"ncpus": 4}},
    }

    def run(command: Sequence[str]) -> str:
        return json.dumps({"nodes": nodes})

    chunk = "ncpus=1:mpiprocs=1:ompthreads=1"
    assert named_hosts((f"1:{chunk}:nvlink=True", None), ["z"], run) == f"1:{chunk}:nvlink=True:host=b"
    assert named_hosts((f"2:{chunk}:cpu_type=milan", None), ["z"], run).count("host=") == 2
    with refused(CommandError, "z"):
        named_hosts((f"2:{chunk}:nvlink=True", None), ["z"], run)


@pytest.mark.parametrize("select", ["2:ncpus=4", "1:ncpus=5", "1:ncpus=1:mem=9gb"])
def test_too_few_nodes_are_an_error_that_names_who_is_missing(select: str) -> None:
    with refused(CommandError, "pbsn2"):
        named_hosts((select, None), ["pbsn2"], answers("pbsnodes-one-down"))


def test_a_submission_names_the_nodes_for_the_shape_that_its_script_has(tmp_path: Path) -> None:
    script = tmp_path / "1.sh"
    script.write_text(render(job_plan(scheduler="pbs", cpus_per_rank=1), JobArray(first=0, count=1), SCRIPT))

    def run(command: Sequence[str]) -> str:
        return VERSION if command[0] == "qstat" else said("pbsnodes-one-down")

    job = Submission(script=str(script), array=JobArray(first=0, count=1), exclude=("pbsn3",))
    chunk = "ncpus=4:ngpus=4:mpiprocs=1:ompthreads=1"
    assert Pbs().submit_command(job, run) == [
        "qsub",
        "-l",
        f"select=1:{chunk}:host=pbsn2+1:{chunk}:host=pbsn1",
        str(script),
    ]


# --- gangs that share an allocation


def test_gangs_of_a_node_get_gpus_of_their_own() -> None:
    plan = job_plan(nodes=1, ranks_per_node=2, job_nodes=2, job_slots_per_node=4)
    assert [Pbs().share(plan, place) for place in range(4)] == [
        {"HPC_DET_HOSTS": "0", "HPC_DET_SLOTS": "0,1"},
        {"HPC_DET_HOSTS": "0", "HPC_DET_SLOTS": "2,3"},
        {"HPC_DET_HOSTS": "1", "HPC_DET_SLOTS": "0,1"},
        {"HPC_DET_HOSTS": "1", "HPC_DET_SLOTS": "2,3"},
    ]


def test_a_gang_has_each_host_once_and_in_a_shared_job_its_own_ones(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn3\n")
    assert Pbs().hosts({"PBS_NODEFILE": str(nodes)}) == ["n1", "n2", "n3"]
    assert Pbs().hosts({"PBS_NODEFILE": str(nodes), "HPC_DET_HOSTS": "1,2"}) == ["n2", "n3"]


def test_gangs_of_several_nodes_get_nodes_of_their_own() -> None:
    plan = job_plan(nodes=2, ranks_per_node=4, job_nodes=4, job_slots_per_node=4, slot_type="cpu")
    assert [Pbs().share(plan, place) for place in range(2)] == [{"HPC_DET_HOSTS": "0,1"}, {"HPC_DET_HOSTS": "2,3"}]
