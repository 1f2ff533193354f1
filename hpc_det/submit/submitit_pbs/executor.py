"""The executor of a program, the parameters that it accepts, and the directives of qsub for them."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from hpc_det.node.files import write_atomic
from hpc_det.schedulers.pbs.answers import from_pbs, submitted_id
from hpc_det.schedulers.pbs.hosts import exports, of_no_machine
from hpc_det.submit.submitit_pbs.job import PbsJob
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths

GENERIC = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
"""Parameters of every executor, beside stderr_to_stdout, which AutoExecutor accepts without a prefix."""
_OURS = {
    "N": "use name",
    "q": "use pbs_queue",
    "A": "use pbs_account",
    "J": "use map_array or batch, and pbs_array_parallelism",
    "V": "a file passes your environment to the job",
    "v": "a file passes your environment to the job",
    "j": "submitit names the logs",
    "o": "submitit names the logs",
    "e": "submitit names the logs",
    "k": "submitit names the logs",
    "r": "submitit requeues jobs",
    "I": "jobs are not interactive",
}
"""Flags of qsub that are refused in additional_parameters, and the reason or the parameter to use instead."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_UNSAFE = re.compile(r"[\s'\"\\]")
_UNSAFE_WORDS = "blanks, quotes, backslashes or control characters"


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of a job. Raises ValueError with every invalid one at its creation."""

    name: str = "submitit"
    """Name of the job; PBS gets "_" for characters that it does not accept."""
    timeout_min: float = 5
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    mem_gb: float | None = None
    """Memory of each node in GB."""
    stderr_to_stdout: bool = False
    queue: str | None = None
    account: str | None = None
    gpu_type: str | None = None
    """Type of the GPUs: the value of the resource `gpu_type` of a chunk."""
    setup: Sequence[str] = ()
    """Shell lines that run before the tasks start."""
    signal_delay_s: int = 90
    """Seconds before the time limit at which task 0 must save; at most half of the time."""
    array_parallelism: int = 256
    additional_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Flags of qsub, each with a text, several texts, or True. They come last, and of two selects PBS takes
    the last.
    """

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Parameters:
        """Return the parameters, with defaults for None. Raises ValueError for unknown names, too, with all
        known ones.
        """
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"unknown parameters {unknown}; PBS takes {sorted(known)}")
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def walltime_s(self) -> int:
        return math.ceil(self.timeout_min * 60)

    @property
    def warning_s(self) -> float:
        """Seconds before the time limit at which the tasks are notified."""
        return min(self.signal_delay_s, self.walltime_s / 2)

    def directives(self) -> list[str]:
        """Return the script's `#PBS` directives. Jobs start with umask 077, and PBS may rerun them."""
        from hpc_det.schedulers.pbs.scheduler import job_name  # this module is loaded by every program with submitit

        hours, seconds = divmod(self.walltime_s, 3600)
        lines = [f"-N {job_name(self.name)}", f"-l select={self._select()}", "-l place=scatter"]
        lines += [f"-l walltime={hours:02}:{seconds // 60:02}:{seconds % 60:02}", "-r y", "-j oe", "-k oed"]
        lines += [f"-q {self.queue}"] if self.queue else []
        lines += [f"-A {self.account}"] if self.account else []
        return lines + [f"-{flag}" if text is True else f"-{flag} {text}" for flag, text in self._additional()]

    def _select(self) -> str:
        """Return the select statement, with one chunk for each node. PBS sets NCPUS and OMP_NUM_THREADS (to ompthreads)
        from it.
        """
        tasks, cpus = self.tasks_per_node, self.cpus_per_task
        gpus = f":ngpus={self.gpus_per_node}" if self.gpus_per_node else ""
        gpus += f":gpu_type={self.gpu_type}" if self.gpu_type else ""
        memory = f":mem={math.ceil(self.mem_gb * 1024)}mb" if self.mem_gb else ""
        return f"{self.nodes}:ncpus={tasks * cpus}:mpiprocs={tasks}:ompthreads={cpus}{gpus}{memory}"

    def _additional(self) -> Iterator[tuple[str, Any]]:
        for flag, value in self.additional_parameters.items():
            several = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
            yield from ((flag.lstrip("-"), each) for each in several)

    def _problems(self) -> Iterator[str]:
        for name in ("nodes", "tasks_per_node", "cpus_per_task", "array_parallelism", "timeout_min"):
            if getattr(self, name) <= 0:
                yield f"{name}: {getattr(self, name)!r} is not above 0"
        if self.gpus_per_node < 0 or self.signal_delay_s < 0:
            yield f"gpus_per_node {self.gpus_per_node}, signal_delay_s {self.signal_delay_s}: below 0"
        if self.gpu_type is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", self.gpu_type):
            yield f"pbs_gpu_type: {self.gpu_type!r} is not made of letters, digits, '_', '.' and '-'"
        if not self.name:
            yield "name: '' is empty"
        for name, text in (("pbs_queue", self.queue), ("pbs_account", self.account)):
            if text is not None and (not text or _UNSAFE.search(text) or _CONTROL.search(text) or text.startswith("-")):
                yield f"{name}: {text!r} is empty, begins with '-', or contains {_UNSAFE_WORDS}"
        if isinstance(self.setup, str):
            yield f"pbs_setup: {self.setup!r} is one text; give a list of lines"
        yield from self._additional_problems()

    def _additional_problems(self) -> Iterator[str]:
        for flag, value in self._additional():
            where = f"pbs_additional_parameters: {flag!r}"
            if not re.fullmatch("[A-Za-z]", flag):
                yield f"{where} is not a flag of qsub, which has single letters such as 'l', 'm' and 'W'"
            elif flag in _OURS:
                yield f"{where} is set already; {_OURS[flag]}"
            elif value is not True and (not str(value) or _UNSAFE.search(str(value)) or _CONTROL.search(str(value))):
                yield f"{where}: {value!r} is empty, or contains {_UNSAFE_WORDS}, which qsub cannot read"


TEMPLATE = "submitit_pbs.sh.j2"


class PbsExecutor(core.PicklingExecutor):
    """An executor for jobs on PBS Pro or OpenPBS.

    `python` is the shell command of the tasks' Python, which also needs hpc_det; `Parameters` lists what
    update_parameters accepts. Raises RuntimeError if PBS is not on PATH.
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
                "no qsub of PBS Pro or OpenPBS on PATH (the qsub of Torque and the wrapper of Slurm do not count); "
                "run this on a login node of the cluster"
            )

    @classmethod
    def affinity(cls) -> int:
        """Return 2 if PBS is installed; -1 if there is no qsub, or if it belongs to another scheduler."""
        qsub = shutil.which("qsub")
        # 2: a cluster, as for submitit's Slurm executor (submitit.core.core.Executor.affinity).
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
        """Submit the functions, several of them as one array; a single one as a job, since PBS refuses an
        array of one.
        """
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
    """Return the template's variables. Raises ValueError for a path that cannot be written in a line of a script."""
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
    """Return the range of an array. The limit is written only if it limits something, since PBS has it from version 20
    on.
    """
    return f"0-{size - 1}" + (f"%{at_once}" if at_once < size else "")


def _quoted(text: str) -> str:
    if any(ord(character) < 32 or character == "\x7f" for character in text):
        raise ValueError(f"{text!r} holds a control character, which would end a line of the script")
    return shlex.quote(text)


def _in_shell(pattern: str) -> str:
    """Return submitit's pattern with the script's variables, since the id is known only when the script runs."""
    variables = {"%j": "$job_id", "%A": "${job_id%_*}", "%a": "${job_id#*_}"}
    words = re.split("(%[jAa])", pattern)
    return "".join(f'"{variables[word]}"' if word in variables else _quoted(word) for word in words if word)


@functools.cache
def _is_pbs(qsub: str) -> bool:
    """Return whether the command is PBS's, which prints `pbs_version = 23.06.06`; Torque and Slurm's wrapper print
    other texts.
    """
    try:
        answer = subprocess.run(
            [qsub, "--version"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "pbs_version" in answer.stdout + answer.stderr


def _umask() -> int:
    """Return the umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
