"""qsub of the stand-in accepts, refuses and passes on what the recorded one did, command by command."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from tests.labs.pbs_lab import Job, PbsLab
from tests.labs.pbs_recorded import RECORDED, Step, recorded, transcript
from tests.wait import wait_for

REFUSALS = [
    step
    for step in transcript("errors/qsub-bad-requests.txt")
    if step.command.startswith("qsub ") and not re.search(r"\.\.\.|\.pbs|walltime=2 days|^qsub -v 'A=1", step.command)
]
SCRIPTS = {
    "bad.pbs": "#!/bin/bash\n#PBS -l select=1:bogus=3\ntrue\n",
    "bad2.pbs": "#!/bin/bash\n#PBS --bogus\ntrue\n",
    "d_name.pbs": '#!/bin/bash\n#PBS -N d_name\necho "name=$PBS_JOBNAME"\n#PBS -N too_late\n',
    "blank.pbs": "#!/bin/bash\n# PBS -N spaced\n\n#PBS -N after_blank\necho x\n#PBS -N after_command\n",
    "s5.sh": "exit 5\n",
    "killed.sh": "#!/bin/sh\nkill -KILL $$\n",
    "no_interpreter.sh": "#!/nonexistent/interpreter\n",
}


def test_requests_that_are_refused_or_not(pbs_lab: PbsLab) -> None:
    """The words and exit codes are the same; where the recorded qsub printed an ID, this one prints one."""
    assert len(REFUSALS) > 30
    differ = [step.command for step in REFUSALS if not is_as_recorded(pbs_lab, step)]
    assert differ == []


def is_as_recorded(lab: PbsLab, step: Step) -> bool:
    done = lab.ended("/bin/bash", "-c", step.command)
    ids = [re.sub(r"\d+", "N", line) for line in done.stdout.splitlines()]
    return (done.returncode, ids, done.stderr.splitlines()) == (
        step.code,
        [re.sub(r"\d+", "N", line) for line in step.out],
        step.err,
    )


@pytest.mark.parametrize(("script", "says"), [("bad.pbs", "qsub: Unknown resource: bogus"), ("bad2.pbs", "--bogus")])
def test_bad_directives(any_pbs: PbsLab, script: str, says: str) -> None:
    (any_pbs.home / script).write_text(SCRIPTS[script])
    done = any_pbs.ended("qsub", script)
    assert says in done.stderr
    assert done.returncode in (1, 187)


def test_directives_are_read_until_the_first_command(any_pbs: PbsLab) -> None:
    names = [any_pbs.job(any_pbs.submit(script=SCRIPTS[name]))["Job_Name"] for name in ("d_name.pbs", "blank.pbs")]
    assert names == ["d_name", "after_blank"]


def test_the_script_is_copied_to_a_temporary_folder_first(pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """See get_script in qsub_sup.c and pbs_get_tmpdir in pbs_loadconf.c of the source of qsub."""
    monkeypatch.setenv("TMPDIR", str(pbs_lab.home / "gone"))
    (pbs_lab.home / "script").write_text("true\n")
    done = pbs_lab.ended("qsub", "script")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"qsub: could not create/open tmp file {pbs_lab.home}/gone/" in done.stderr
    assert pbs_lab.ended("qsub", "--", "/bin/true").returncode == 0
    monkeypatch.setenv("PBS_TMPDIR", str(pbs_lab.home))
    assert pbs_lab.ended("qsub", "script").returncode == 0


def test_values_of_v_arrive_as_recorded(pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("V_FROMENV", "from the environment, with comma")
    (pbs_lab.home / "pv.py").write_text((RECORDED / "jobs" / "pv.py.txt").read_text())
    parts = [part for part in recorded("misc/qsub-v-quoting.txt").split("$ ")[1:] if "(5000 x)" not in part]
    answers = [submit_variables(pbs_lab, number, part) for number, part in enumerate(parts)]
    wait_for(lambda: not pbs_lab.run("qselect"), 60)
    jobs = json.loads(pbs_lab.run("qstat", "-x", "-f", "-F", "json"))["Jobs"]
    for number, (part, answer) in enumerate(zip(parts, answers, strict=True)):
        if "qsub: qsub: " in part:
            assert answer == "qsub: cannot send environment with the job\n", part
        else:
            assert arrived(pbs_lab, number) == re.findall(r"  in the job: (.*)", part)
            assert shown(jobs[answer.strip()]) == re.findall(r"qstat JSON: (.*)", part)[0]


def submit_variables(lab: PbsLab, number: int, part: str) -> str:
    """Run one command of the transcript; return its output."""
    command = re.split(r"\nqsub: ", part)[0].replace("/usr/bin/python3", f"{sys.executable} -X utf8")
    done = lab.ended("/bin/bash", "-c", command.replace("-- ", f"-j oe -o out{number} -- "))
    return done.stdout or done.stderr


def arrived(lab: PbsLab, number: int) -> list[str]:
    return (lab.home / f"out{number}").read_text().splitlines()


def shown(job: Job) -> str:
    return str({name: value for name, value in job["Variable_List"].items() if name.startswith("V_")})


def test_arguments_of_a_program_arrive_but_for_empty_ones(pbs_lab: PbsLab) -> None:
    words = ["plain", "two words", "x<y&z>", '"dq"', "it's", "$HOME", "*", "a,b", "--opt=1", "new\nline", "", " last"]
    code = "import sys; print(ascii(sys.argv[1:]))"
    job = pbs_lab.submit("-j", "oe", "-o", "out", "--", sys.executable, "-c", code, *words)
    seen = pbs_lab.wait_for(job, "F")
    assert (pbs_lab.home / "out").read_text().strip() == ascii([word for word in words if word])
    assert "<jsdl-hpcpa:Argument>x&lt;y&amp;z&gt;</jsdl-hpcpa:Argument>" in seen["argument_list"]
    assert "<jsdl-hpcpa:Argument>it&apos;s</jsdl-hpcpa:Argument>" in seen["argument_list"]


def test_exit_statuses(any_pbs: PbsLab) -> None:
    programs = {0: "exit 0", 3: "exit 3", 255: "exit 255", 265: "kill -KILL $$", 271: "kill -TERM $$"}
    jobs = {code: any_pbs.submit("--", "/bin/sh", "-c", text) for code, text in programs.items()}
    jobs[254] = any_pbs.submit("--", "/nonexistent/program")
    scripts = {5: "s5.sh", 137: "killed.sh", 127: "no_interpreter.sh"}
    jobs |= {code: any_pbs.submit(script=SCRIPTS[name]) for code, name in scripts.items()}
    ended = {code: any_pbs.wait_for(job, "F") for code, job in jobs.items()}
    assert {code: job["Exit_status"] for code, job in ended.items()} == {code: code for code in jobs}
    assert {job["substate"] for code, job in ended.items() if code} == {93}


def test_block_returns_the_job_s_exit_code(any_pbs: PbsLab) -> None:
    done = any_pbs.ended("qsub", "-W", "block=true", "--", "/bin/sh", "-c", "exit 6")
    assert done.returncode == 6
    assert re.fullmatch(r"\d+\.\S+\n", done.stdout)


def test_output_that_nobody_wants_leaves_dev_null_as_it_is(pbs_lab: PbsLab) -> None:
    before = os.stat(os.devnull).st_mode
    pbs_lab.wait_for(pbs_lab.submit("-o", os.devnull, "-e", os.devnull, "--", "/bin/echo", "hi"), "F")
    assert os.stat(os.devnull).st_mode == before


def test_output_goes_where_it_was_asked_for(pbs_lab: PbsLab) -> None:
    (pbs_lab.home / "folder").mkdir()
    echo = ["--", "/bin/echo", "hi"]
    jobs = [
        pbs_lab.submit("-N", "plain", *echo),
        pbs_lab.submit("-j", "oe", "-o", "folder/", *echo),
        pbs_lab.submit("-k", "oed", "-j", "oe", "-o", "folder/direct.txt", *echo),
        pbs_lab.submit("-o", "/nonexistent/folder/out", *echo),
        pbs_lab.submit("-N", "open", "-W", "umask=022", *echo),
        pbs_lab.submit("-N", "arr", "-J", "3-5:2", *echo),
    ]
    assert {pbs_lab.wait_for(job, "F")["Exit_status"] for job in jobs} == {0}
    found = {path.name: oct(path.stat().st_mode & 0o777) for path in pbs_lab.home.glob("*.o*")}
    assert found == {"plain.o0": "0o600", "open.o4": "0o644", "arr.o5.3": "0o600", "arr.o5.5": "0o600"}
    assert {path.name for path in (pbs_lab.home / "folder").iterdir()} == {f"{jobs[1]}.OU", "direct.txt"}
