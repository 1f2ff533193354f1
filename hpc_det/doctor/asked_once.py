"""Commands that are asked all at once, and none of them twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hpc_det.schedulers.scheduler import Run

AT_ONCE = 16


class AskedOnce:
    """A `Run` whose commands may begin before their answers are needed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._answers: dict[tuple[str, ...], Future[str]] = {}

    def __enter__(self) -> AskedOnce:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def begin(self, commands: Iterable[Sequence[str]]) -> None:
        for command in commands:
            self._begun(command)

    def __call__(self, command: Sequence[str]) -> str:
        """Raises CommandError, as often as one asks for what failed."""
        return self._begun(command).result()

    def _begun(self, command: Sequence[str]) -> Future[str]:
        key = tuple(command)
        if key not in self._answers:
            self._answers[key] = self._threads.submit(self._run, key)
        return self._answers[key]
