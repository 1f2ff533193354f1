"""A stand-in for squeue that answers like Slurm 22.05, and whose answers can be truncated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpc_det.schedulers.scheduler import CommandError, array_of

KNOWS_NONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
"""Shell code of a squeue that is asked for one job and does not know it."""


class SqueueOnPaper:
    def __init__(self, lines: str, cut: Callable[[str, int], str] = lambda answer, number: answer) -> None:
        """`cut`: the part of an answer that arrives, from the answer and its number, which begins at 0."""
        self._lines = lines.splitlines(keepends=True)
        self._cut = cut
        self.asked: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        asked = next(word for word in command if word.startswith("--jobs=")).removeprefix("--jobs=").split(",")
        lines = [line for line in self._lines if array_of(line.partition("|")[0]) in asked]
        if "--sort=-i" in command:
            lines.reverse()
        self.asked.append(command)
        if not lines and len(asked) == 1:
            raise CommandError("squeue: refused with exit code 1: slurm_load_jobs error: Invalid job id specified")
        return self._cut("".join(["JOBID|STATE|REASON\n", *lines]), len(self.asked) - 1)
