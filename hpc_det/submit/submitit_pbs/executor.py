"""What a program submits with."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from hpc_det.node.files import write_atomic
from hpc_det.schedulers.pbs.answers import from_pbs, submitted_id
from hpc_det.schedulers.pbs.hosts import exports, of_no_machine
from hpc_det.submit.submitit_pbs.job import PbsJob
from hpc_det.submit.submitit_pbs.parameters import GENERIC, Parameters
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths

TEMPLATE = "submitit_pbs.sh.j2"


class PbsExecutor(core.PicklingExecutor):
    """Jobs on PBS Pro or OpenPBS. `python` is the shell command that runs the tasks' Python, which needs hpc_det, too;
    see `Parameters` for what update_parameters takes.

    Raises RuntimeError where no PBS is on PATH.
    """

    job_class = PbsJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = shlex.quote(sys.executable) if python is None else python
        self._array_size = 0
        if self.affinity() <= 0:
            raise RuntimeError(
                "no qsub of PBS Pro or OpenPBS on PATH (that of Torque, or the one that comes with Slurm, is none); "
                "run this on a login node of the cluster"
            )

    @classmethod
    def affinity(cls) -> int:
        """-1 for another scheduler's command of the same name."""
        qsub = shutil.which("qsub")
        return 2 if qsub and _is_pbs(qsub) else -1

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {each.name for each in fields(Parameters)} - {*GENERIC, "stderr_to_stdout"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        Parameters.of({**self.parameters, **kwargs})
        super()._internal_update_parameters(**kwargs)

    @property
    def _asked(self) -> Parameters:
        return Parameters.of(self.parameters)

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Several are one array. One is none: PBS refuses a range of one."""
        if len(delayed_submissions) == 1:
            return super()._internal_process_submissions(delayed_submissions)
        array = copy.copy(self)
        array._array_size = len(delayed_submissions)
        pickles = [self._dump(submission) for submission in delayed_submissions]
        self._throttle()
        number = array._submit_command(self._submitit_command_str).job_id
        tasks = range(self._num_tasks())
        jobs: list[core.Job[Any]] = [PbsJob(self.folder, f"{number}_{index}", tasks) for index in range(len(pickles))]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _dump(self, submission: utils.DelayedSubmission) -> Path:
        path = self._new_file(f"{uuid.uuid4().hex}.pkl")
        path.parent.mkdir(parents=True, exist_ok=True)
        submission.set_timeout(math.ceil(self._asked.timeout_min), self.max_num_timeout)
        submission.dump(path)
        return path

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m submitit.core._submit {shlex.quote(str(self.folder))}"

    def _num_tasks(self) -> int:
        return self._asked.nodes * self._asked.tasks_per_node

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        from hpc_det.submit.render import render_template  # this module is loaded by every program with submitit

        environment = self._new_file(f".submission_environment_{uid}.sh")
        write_atomic(environment, exports(of_no_machine(os.environ)), private=True)
        return render_template(
            TEMPLATE, script_variables(self._asked, self.folder, command, environment, self._output(uid))
        )

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        uid = submission_file_path.stem.removeprefix(".submission_file_")
        array = ["-J", _range(self._array_size, self._asked.array_parallelism)] if self._array_size else []
        return ["qsub", *array, "-o", str(self._output(uid)), str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        try:
            return from_pbs(submitted_id(string if isinstance(string, str) else string.decode()))
        except ValueError as error:
            raise utils.FailedSubmissionError(str(error)) from None

    def _output(self, uid: str) -> Path:
        return self._new_file(f".submission_output_{uid}.log")

    def _new_file(self, name: str) -> Path:
        folder: Path = utils.JobPaths.get_first_id_independent_folder(self.folder)
        return folder / name


def script_variables(
    asked: Parameters, folder: Path, command: str, environment: Path, output: Path
) -> dict[str, object]:
    """For the template. Raises ValueError for a path that no line of a script can hold."""
    from hpc_det.schedulers.pbs.scheduler import job_name

    paths = PbsJobPaths(folder)
    stdout, stderr = (str(path).replace("%t", "0") for path in (paths.stdout, paths.stderr))
    return {
        "title": job_name(asked.name),
        "directives": [*asked.directives(), f"-W umask={_umask():03o}"],
        "environment": _quoted(str(environment)),
        "log_folder": _in_shell(str(paths.folder)),
        "stdout": _in_shell(stdout),
        "stderr": "&1" if asked.stderr_to_stdout else f">{_in_shell(stderr)}",
        "cwd": _quoted(os.getcwd()),
        "setup": list(asked.setup),
        "first_process": " ".join(map(_quoted, _first_process(asked, folder, command, output))),
    }


def _first_process(asked: Parameters, folder: Path, command: str, output: Path) -> list[str]:
    options: Mapping[str, object] = {
        "output": output,
        "nodes": asked.nodes,
        "tasks-per-node": asked.tasks_per_node,
        "walltime-s": asked.walltime_s,
        "warning-s": asked.warning_s,
    }
    words = [sys.executable, "-m", "hpc_det.submit.submitit_pbs.in_job", str(folder), command]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return words + ["--stderr-to-stdout"] * asked.stderr_to_stdout


def _range(size: int, at_once: int) -> str:
    """The limit came with version 20 of PBS: it is named where it limits something."""
    return f"0-{size - 1}" + (f"%{at_once}" if at_once < size else "")


def _quoted(text: str) -> str:
    if any(ord(character) < 32 or character == "\x7f" for character in text):
        raise ValueError(f"{text!r} holds a control character, which would end a line of the script")
    return shlex.quote(text)


def _in_shell(pattern: str) -> str:
    """submitit's patterns as the script's variables: the id is known when it runs."""
    variables = {"%j": "$job_id", "%A": "${job_id%_*}", "%a": "${job_id#*_}"}
    words = re.split("(%[jAa])", pattern)
    return "".join(f'"{variables[word]}"' if word in variables else _quoted(word) for word in words if word)


@functools.cache
def _is_pbs(qsub: str) -> bool:
    """PBS answers `pbs_version = 23.06.06`, Torque `Version: 6.1`, Slurm's wrapper with its usage."""
    try:
        answer = subprocess.run(
            [qsub, "--version"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "pbs_version" in answer.stdout + answer.stderr


def _umask() -> int:
    """Only setting it tells it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
