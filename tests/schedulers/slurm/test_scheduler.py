"""Slurm: parsing of recorded answers, commands as processes, and the real Slurm where it matters."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import cast

import pytest

from hpc_det.plan.job_plan import JobArray
from hpc_det.requeue import Cause
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, run_command
from hpc_det.schedulers.slurm.answers import STATES, parse_scontrol, parse_squeue, with_arrays
from hpc_det.schedulers.slurm.scheduler import Slurm, directives
from tests.facts import refused
from tests.labs.slurm import SlurmLab
from tests.plan.plans import job_plan
from tests.schedulers.one_job import submission
from tests.schedulers.slurm.squeue_on_paper import SqueueOnPaper
from tests.stub import Stub
from tests.wait import wait_for

# Slurm 22.05.8, `scontrol show job --oneliner`, with the times and the name left open
SHOW_JOB = (
    "JobId=99 JobName={name} UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=4294901743 Nice=0 Account=root "
    "QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:01:10 TimeLimit=00:02:00 TimeMin=N/A SubmitTime=2026-11-20T11:45:04 EligibleTime=2026-11-20T11:45:04 "
    "AccrueTime=2026-11-20T11:45:04 StartTime=2026-11-20T11:45:05 EndTime={end} Deadline=N/A "
    "PreemptEligibleTime=2026-11-20T11:45:05 PreemptTime={preempted} SuspendTime=None SecsPreSuspend=0 "
    "LastSchedEval=2026-11-20T11:45:05 Scheduler=Backfill Partition=low AllocNode:Sid=login:31517 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=node[1-2] BatchHost=node1 NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 "
    "ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 Command=/home/ada/job.sh WorkDir=/home/ada StdOut=/home/ada/a b.log"
)
NOW = 1_795_000_000.0
ONE_JOB, SCRIPT = JobArray(first=0, count=1), Path("/home/ada/hpc_det/experiments/12/jobs/1.sh")


def slurm_time(moment: float) -> str:
    return datetime.fromtimestamp(moment).isoformat(timespec="seconds")


def shown(name: str = "digits", *, end: str, preempted: str = "None") -> str:
    return SHOW_JOB.format(name=name, end=end, preempted=preempted)


# --- states


def test_squeue_is_read_line_by_line() -> None:
    assert parse_squeue("7|RUNNING|None\n8_3|PENDING|Resources\n9|COMPLETED|None\n") == {
        "7": JobStatus(JobState.RUNNING, "None"),
        "8_3": JobStatus(JobState.QUEUED, "Resources"),
        "9": JobStatus(JobState.ENDED, "None"),
    }


def test_a_job_that_waits_for_its_begin_time_is_held() -> None:
    found = parse_squeue("7|PENDING|BeginTime\n8|RUNNING|BeginTime\n")
    assert [found[job_id].state for job_id in ("7", "8")] == [JobState.HELD, JobState.RUNNING]


def test_a_suspended_job_still_has_its_nodes() -> None:
    found = with_arrays(parse_squeue("7|SUSPENDED|None\n8_1|SUSPENDED|None\n8_2|RUNNING|None\n"))
    assert {found[job_id].state for job_id in ("7", "8")} == {JobState.RUNNING}
    assert [found[job_id].is_suspended for job_id in ("7", "8_1", "8")] == [True, True, False]


def test_a_reason_may_hold_the_separator_and_noise_is_no_row() -> None:
    assert parse_squeue("slurm: a warning\n\n7|PENDING|a|b\n") == {"7": JobStatus(JobState.QUEUED, "a|b")}


def test_a_state_from_a_newer_slurm_is_unknown_and_no_crash() -> None:
    assert parse_squeue("7|TELEPORTING|None\n")["7"].state is JobState.UNKNOWN


def test_every_state_of_the_manual_has_its_row() -> None:
    # squeue(1) of Slurm 22.05, JOB STATE CODES
    manual = """BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING
        PREEMPTED RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT
        STAGE_OUT STOPPED SUSPENDED TIMEOUT"""
    assert set(STATES) == set(manual.split())


# --- status


def test_jobs_that_slurm_has_forgotten_have_ended() -> None:
    assert Slurm().status(["7", "8"], SqueueOnPaper("7|RUNNING|None\n")) == {
        "7": JobStatus(JobState.RUNNING, "None"),
        "8": JobStatus(JobState.ENDED, "forgotten by Slurm"),
    }


@pytest.mark.integration
def test_a_single_job_that_slurm_has_forgotten_has_ended_though_squeue_fails(stub: Stub) -> None:
    stub("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert Slurm().status(["7"], run_command)["7"].state is JobState.ENDED


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
        "echo '7|COMPLETED|None'; exit 1",
        "kill -9 $$",
    ],
)
def test_a_squeue_that_fails_is_no_news_of_any_job(stub: Stub, text: str) -> None:
    stub("squeue", text)
    found = Slurm().status(["7", "8"], run_command)
    assert [found[job_id].state for job_id in ("7", "8")] == [JobState.UNKNOWN] * 2
    assert "squeue" in found["7"].reason


@pytest.mark.integration
def test_an_absent_squeue_is_no_news_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Slurm().status(["7"], run_command)["7"].state is JobState.UNKNOWN


@pytest.mark.integration
def test_all_jobs_are_asked_for_at_once(stub: Stub, tmp_path: Path) -> None:
    stub("squeue", f"echo \"$@\" >>'{tmp_path}/asked'; printf '%s|RUNNING|None\\n' 7 8_1 9")
    Slurm().status(["7", "8_1", "9"], run_command)
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert "--jobs=7,8,9" in asked


def test_the_elements_of_an_array_that_wait_together_are_told_one_by_one() -> None:
    squeue = SqueueOnPaper("4711_[3,5-9:2%16]|PENDING|JobArrayTaskLimit\n")
    found = Slurm().status(["4711", "4711_3", "4711_5", "4711_6", "4711_9"], squeue)
    waits = JobStatus(JobState.QUEUED, "JobArrayTaskLimit")
    assert found == dict.fromkeys(found, waits) | {"4711_6": JobStatus(JobState.ENDED, "forgotten by Slurm")}
    assert all("SLURM_BITSTR_LEN=0" in command for command in squeue.asked), "long lists of elements would be cut off"


@pytest.mark.integration
def test_what_a_user_has_set_for_squeue_hides_no_job_of_hers(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "high")
    stub("squeue", '[ -z "$SQUEUE_PARTITION" ] && echo "7|RUNNING|None"')
    assert Slurm().status(["7"], run_command)["7"].state is JobState.RUNNING


def test_many_forgotten_jobs_are_not_asked_about_one_by_one() -> None:
    squeue, many = SqueueOnPaper(""), list(map(str, range(1, 100)))
    assert {status.state for status in Slurm().status(many, squeue).values()} == {JobState.ENDED}
    assert len(squeue.asked) == 3


@pytest.mark.parametrize("forgotten", [1, 5, 30])
def test_forgotten_jobs_beside_one_that_runs_cost_one_question_more(forgotten: int) -> None:
    squeue, ids = SqueueOnPaper("100|RUNNING|None\n"), ["100", *map(str, range(1, forgotten + 1))]
    found = Slurm().status(ids, squeue)
    assert [status.state for status in found.values()] == [JobState.RUNNING, *[JobState.ENDED] * forgotten]
    assert len(squeue.asked) == 2


ARRAY = "4711_1|COMPLETED|None\n4711_2|RUNNING|None\n4711_3|PENDING|JobArrayTaskLimit\n"


def array_status(lines: str, *job_ids: str) -> list[JobStatus]:
    return list(Slurm().status(job_ids, SqueueOnPaper(lines)).values())


def test_each_element_of_an_array_has_a_state_of_its_own() -> None:
    found = array_status(ARRAY, "4711_1", "4711_2", "4711_3", "4711_4")
    assert [status.state for status in found] == [
        JobState.ENDED,
        JobState.RUNNING,
        JobState.QUEUED,
        JobState.ENDED,
    ]


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        (ARRAY, JobState.RUNNING),
        ("4711_1|COMPLETED|None\n4711_2|PENDING|Resources\n", JobState.QUEUED),
        ("4711_1|COMPLETED|None\n4711_2|TIMEOUT|TimeLimit\n", JobState.ENDED),
        ("4711_[5-99%16]|PENDING|JobArrayTaskLimit\n4711_3|COMPLETED|None\n", JobState.QUEUED),
        ("4711_[5-99%16]|PENDING|JobArrayTaskLimit\n4711_3|RUNNING|None\n", JobState.RUNNING),
        ("4711_1|PENDING|BeginTime\n4711_2|PENDING|Resources\n", JobState.HELD),
    ],
)
def test_an_array_runs_while_any_of_its_elements_does_and_waits_while_any_waits(lines: str, state: JobState) -> None:
    (found,) = array_status(lines, "4711")
    assert found.state is state


def test_an_array_names_its_held_elements_so_that_they_can_be_released() -> None:
    lines = "4711_1|PENDING|BeginTime\n4711_2|RUNNING|None\n4711_3|PENDING|BeginTime\n4711_4|PENDING|Resources\n"
    (found,) = array_status(lines, "4711")
    assert (found.state, found.held) == (JobState.RUNNING, ("4711_1", "4711_3"))


@pytest.mark.integration
def test_a_job_that_is_held_can_be_released_by_its_own_id(stub: Stub) -> None:
    stub("squeue", "echo '7|PENDING|BeginTime'")
    assert Slurm().status(["7"], run_command)["7"].held == ("7",)


# --- ids


@pytest.mark.parametrize(("said", "job_id"), [("4711\n", "4711"), ("4711;atlas\n", "4711"), ("lua: hello\n12\n", "12")])
def test_sbatchs_answer_holds_the_id(said: str, job_id: str) -> None:
    assert Slurm().parse_submit(said) == job_id


@pytest.mark.parametrize("said", ["", "Submitted batch job 12", "12\n13", "abc", "-1"])
def test_an_answer_without_an_id_is_an_error_that_quotes_it(said: str) -> None:
    with refused(ValueError, repr(said)):
        Slurm().parse_submit(said)


def test_the_element_of_an_array_is_named_by_both_numbers() -> None:
    env = {"SLURM_JOB_ID": "812", "SLURM_ARRAY_JOB_ID": "811", "SLURM_ARRAY_TASK_ID": "1"}
    assert Slurm().job_id(env) == "811_1"
    assert Slurm().job_id({"SLURM_JOB_ID": "812"}) == "812"


def test_the_place_in_an_array_is_its_task_id() -> None:
    assert Slurm().array_index({"SLURM_ARRAY_JOB_ID": "811", "SLURM_ARRAY_TASK_ID": "7"}) == 7
    assert Slurm().array_index({"SLURM_JOB_ID": "812"}) == 0


def test_the_node_of_an_agent_is_what_srun_says() -> None:
    assert Slurm().node_rank({"SLURM_NODEID": "2", "SLURM_PROCID": "5"}) == 2


# --- why was the job signalled?


def cause(stub: Stub, text: str, now: float = NOW, lead_s: int = 90) -> Cause:
    stub("scontrol", f"cat <<'RECORDED'\n{text}\nRECORDED")
    return Slurm().stop_cause(job_plan(signal_lead_s=lead_s), {"SLURM_JOB_ID": "99"}, now, run_command)


@pytest.mark.integration
def test_a_job_with_a_preempt_time_was_preempted_even_near_its_end(stub: Stub) -> None:
    text = shown(end=slurm_time(NOW + 30), preempted=slurm_time(NOW))
    assert cause(stub, text) is Cause.PREEMPTED


@pytest.mark.integration
@pytest.mark.parametrize("early_s", [0, 30, 59])
def test_the_warning_before_the_end_may_come_a_minute_early(stub: Stub, early_s: int) -> None:
    assert cause(stub, shown(end=slurm_time(NOW + 90 + early_s))) is Cause.TIME_LIMIT


@pytest.mark.integration
def test_a_signal_long_before_the_end_is_a_preemption(stub: Stub) -> None:
    assert cause(stub, shown(end=slurm_time(NOW + 90 + 61))) is Cause.PREEMPTED


@pytest.mark.integration
@pytest.mark.parametrize("end", ["Unknown", "N/A", "None"])
def test_without_an_end_no_time_limit_can_be_near(stub: Stub, end: str) -> None:
    assert cause(stub, shown(end=end)) is Cause.PREEMPTED


@pytest.mark.integration
@pytest.mark.parametrize(
    ("state", "reason", "restarts", "expected"),
    [
        ("COMPLETING", "None", 0, Cause.CANCELLED),  # scancel
        ("CANCELLED", "None", 0, Cause.CANCELLED),
        ("COMPLETING", "None", 1, Cause.PREEMPTED),  # requeued: by a preemption without grace, or `scontrol requeue`
        ("COMPLETING", "TimeLimit", 0, Cause.TIME_LIMIT),
        ("COMPLETING", "NodeDown", 0, Cause.NODE_LOST),
    ],
)
def test_a_job_that_is_being_ended_was_cancelled_unless_it_was_put_back(
    stub: Stub, state: str, reason: str, restarts: int, expected: Cause
) -> None:
    fields = f"JobId=99 JobState={state} Reason={reason} Restarts={restarts} EndTime={slurm_time(NOW)} PreemptTime=None"
    assert cause(stub, fields) is expected


@pytest.mark.integration
def test_a_second_requeue_is_harmless(stub: Stub) -> None:
    stub("scontrol", "echo 'Job is pending execution for job 99' >&2; exit 1")
    Slurm().requeue("99", {}, run_command)


@pytest.mark.integration
def test_a_refused_requeue_is_an_error(stub: Stub) -> None:
    stub("scontrol", "echo 'Requested operation is presently disabled for job 99' >&2; exit 1")
    with refused(CommandError, "scontrol", "presently disabled"):
        Slurm().requeue("99", {}, run_command)


@pytest.mark.integration
def test_without_scontrol_both_causes_are_treated_alike(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub("scontrol", "exit 1")
    assert Slurm().stop_cause(job_plan(), {"SLURM_JOB_ID": "99"}, NOW, run_command) is Cause.PREEMPTED
    monkeypatch.setenv("PATH", "/nonexistent")
    assert Slurm().stop_cause(job_plan(), {"SLURM_JOB_ID": "99"}, NOW, run_command) is Cause.PREEMPTED


@pytest.mark.integration
def test_a_jobs_own_name_does_not_speak_for_slurm(stub: Stub) -> None:
    text = shown(f"PreemptTime={slurm_time(NOW)} EndTime=None", end=slurm_time(NOW + 90))
    assert cause(stub, text) is Cause.TIME_LIMIT


def test_fields_without_blanks_are_read() -> None:
    found = parse_scontrol(shown(end="Unknown"))
    assert (found["JobId"], found["TRES"], found["EndTime"]) == ("99", "cpu=2,node=2,billing=2", "Unknown")


# --- flags


def flags(**changes: object) -> dict[str, str]:
    return dict(
        flag.removeprefix("--").partition("=")[::2] for flag in directives(job_plan(**changes), ONE_JOB, SCRIPT)
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"gpus-per-node": "4"}),
        ({"gpu_type": "a100"}, {"gpus-per-node": "a100:4"}),
        ({"gpu_flag": "gres"}, {"gres": "gpu:4"}),
        ({"gpu_flag": "gres", "gpu_type": "a100"}, {"gres": "gpu:a100:4"}),
        ({"gpu_flag": "tres-per-node", "gpu_type": "a100"}, {"tres-per-node": "gres/gpu:a100:4"}),
        ({"slot_type": "cpu"}, {}),
    ],
)
def test_gpus_are_asked_for_in_the_sites_dialect(changes: dict[str, str], expected: dict[str, str]) -> None:
    assert {
        name: value for name, value in flags(**changes).items() if name in ("gres", "gpus-per-node", "tres-per-node")
    } == expected


def test_a_node_has_one_task_with_the_cpus_of_all_its_ranks() -> None:
    found = flags(job_nodes=3, job_slots_per_node=4, cpus_per_rank=5)
    shape = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
    assert [found[name] for name in shape] == ["3", "3", "1", "20"]


def test_an_array_is_asked_for_by_its_places_and_its_limit() -> None:
    def array(**changes: int) -> str | None:
        found = directives(job_plan(), JobArray(first=1000, **changes), SCRIPT)
        return next((flag for flag in found if flag.startswith("--array")), None)

    assert array(count=10, at_once=4) == "--array=0-9%4"
    assert array(count=10) == "--array=0-9"
    assert array(count=1) is None


def test_each_element_of_an_array_prints_into_a_file_of_its_own() -> None:
    array = JobArray(first=0, count=10)
    assert "--output=/home/ada/hpc_det/experiments/12/jobs/1-%a.log" in directives(job_plan(), array, SCRIPT)
    percent = directives(job_plan(), array, Path("/home/100%j/jobs/2.sh"))
    assert "--output=/home/100%%j/jobs/2-%a.log" in percent


def test_gangs_that_share_an_allocation_take_a_part_that_no_other_one_has() -> None:
    plan = job_plan(nodes=1, ranks_per_node=2, gpu_type="a100")
    alone = str(Slurm().script_variables(plan, ONE_JOB, SCRIPT)["srun"]).split()
    shared = str(Slurm().script_variables(plan, JobArray(first=0, count=1, workers_each=4), SCRIPT)["srun"]).split()
    assert [flag for flag in shared if flag not in alone] == ["--exact", "--mem=0", "--gpus-per-node=a100:2"]
    assert [flag for flag in alone if flag not in shared] == []


def test_a_job_that_must_wait_for_another_says_so() -> None:
    assert Slurm().submit_command(submission("1.sh", "4711")) == [
        "sbatch",
        "--parsable",
        "--dependency=afterany:4711",
        "1.sh",
    ]
    assert Slurm().submit_command(submission("1.sh")) == ["sbatch", "--parsable", "1.sh"]


def test_what_is_not_set_is_not_asked_for() -> None:
    assert not flags().keys() & {"mem", "partition", "account", "qos", "time"}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--exclusive", "--nice"), "--exclusive --nice"),
        (("--constraint", "a100&nvlink"), '--constraint "a100&nvlink"'),
        (("--constraint a100", "-C b"), "--constraint a100 -C b"),
        (("--comment=two words",), '"--comment=two words"'),
    ],
)
def test_the_users_own_flags_come_last_on_a_line_of_their_own(args: tuple[str, ...], line: str) -> None:
    rendered = Slurm().script_variables(job_plan(submit_args=args), ONE_JOB, SCRIPT)["directives"]
    assert isinstance(rendered, list)
    assert rendered[-1] == line


def test_without_flags_of_the_user_there_is_no_empty_line() -> None:
    plan = job_plan(submit_args=())
    rendered = Slurm().script_variables(plan, ONE_JOB, SCRIPT)["directives"]
    assert len(cast(list[str], rendered)) == len(directives(plan, ONE_JOB, SCRIPT))


# --- the real Slurm


@pytest.mark.slurm
def test_a_job_on_the_real_slurm_is_held_until_released_and_ends_when_cancelled(
    slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_lab.use(monkeypatch)
    chosen, folder = Slurm(), slurm_lab.folder()
    script = folder / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --begin=now+1hour --output=/dev/null\nexec sleep 900\n")
    job_id = chosen.parse_submit(run_command(chosen.submit_command(submission(script))))

    def wait_until(state: JobState) -> None:
        wait_for(lambda: chosen.status([job_id], run_command)[job_id].state is state)

    wait_until(JobState.HELD)
    chosen.release(job_id, run_command)
    wait_until(JobState.RUNNING)
    assert chosen.stop_cause(job_plan(), {"SLURM_JOB_ID": job_id}, time.time(), run_command) is Cause.PREEMPTED
    chosen.cancel(job_id, run_command)
    wait_until(JobState.ENDED)


@pytest.mark.slurm
def test_the_real_slurm_has_forgotten_a_job_that_never_was(
    slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_lab.use(monkeypatch)
    assert Slurm().status(["987654"], run_command)["987654"].reason == "forgotten by Slurm"
    Slurm().cancel("987654", run_command)  # harmless


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("node1", ["node1"]),
        ("gpu[1-3,07],login", ["gpu1", "gpu2", "gpu3", "gpu07", "login"]),
        ("r[1-2]n[09-10].site", ["r1n09.site", "r1n10.site", "r2n09.site", "r2n10.site"]),
    ],
)
def test_the_nodes_of_a_gang_are_spelt_out(short: str, names: list[str]) -> None:
    assert Slurm().hosts({"SLURM_JOB_NODELIST": short}) == names
    assert Slurm().hosts({"SLURM_JOB_NODELIST": "another", "SLURM_STEP_NODELIST": short}) == names


@pytest.mark.integration
def test_nodes_that_slurm_calls_down_are_named_once(stub: Stub) -> None:
    stub("sinfo", "echo node2; echo node2; echo node7")
    assert Slurm().down_hosts(["node1", "node2"], run_command) == ["node2"]


@pytest.mark.slurm
def test_a_real_slurm_is_asked_for_nodes_that_are_down(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_lab.use(monkeypatch)
    assert Slurm().down_hosts(["node1", "node2"], run_command) == []
    slurm_lab.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    try:
        assert Slurm().down_hosts(["node1", "node2"], run_command) == ["node2"]
    finally:
        slurm_lab.run("scontrol", "update", "NodeName=node2", "State=RESUME")
