"""Calling hooks once for each change of an experiment's state.

The process that changes the state calls them: a job's worker when it starts, the last worker when it exits, or `pause`,
`cancel` and `kill` if no worker is left. If several processes do so at once, the one that creates the claim, a file
`STATE-N.json` for the N-th submission of the experiment, calls the hooks. If that process is killed before it has
called them, no other process does: a missing notification is better than a duplicate.

Errors of hooks never affect the training or its state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpc_det.node.files import make_folder, write_first
from hpc_det.node.json_files import json_text, read_json, write_json
from hpc_det.notify import delivery
from hpc_det.notify.delivery import HookError, News
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentState, ExperimentView

Hook = Mapping[str, Any]
# States in which no job of the experiment is running or waiting.
_REST = [state for state in ExperimentState if state is ExperimentState.PAUSED or state.is_final]
LEEWAY_S = 2.0
"""Seconds after the time limit of a hook for killing its processes."""


def tell_running(experiment: ExperimentFolder) -> list[str]:
    """Notify hooks that the experiment has started. Returns a sentence for each hook that failed."""
    return _guarded(experiment, (ExperimentState.RUNNING,), lambda view: ExperimentState.RUNNING)


def tell_rest(experiment: ExperimentFolder) -> list[str]:
    """Notify hooks if the experiment is paused or has ended. Returns a sentence for each hook that failed."""
    return _guarded(experiment, _REST, lambda view: view.settled())


@contextmanager
def hooks_told(experiment: ExperimentFolder, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Notify hooks of the start and the end of the experiment; the block is the work of one worker.

    The block begins at once, while a thread notifies hooks of the start. Yields a function that waits for that thread;
    a worker calls it before it exits for good, so that no hook receives the end before the start. A worker that is
    requeued need not call it. `say` prints the failures of hooks.
    """

    def tell() -> None:
        for problem in tell_running(experiment):
            say(problem)

    beginning = threading.Thread(target=tell, daemon=True)
    beginning.start()
    yield lambda: beginning.join(delivery.TIME_LIMIT_S + LEEWAY_S)
    for problem in tell_rest(experiment):
        say(problem)


def _guarded(
    experiment: ExperimentFolder,
    possible: Sequence[ExperimentState],
    state_of: Callable[[ExperimentView], ExperimentState | None],
) -> list[str]:
    """Notify hooks of the state that `state_of` returns. Never raises; returns a sentence for each hook that failed."""
    try:
        hooks = (read_json(experiment.effective) or {}).get("notify") or []
        # the journal of the search is only read if there is a hook for one of the possible states
        if not any(state.value in hook["states"] for hook in hooks for state in possible):
            return []
        view = ExperimentView(experiment)
        state = state_of(view)
        return _tell(view, state, hooks) if state else []
    except Exception as error:
        return [f"notifying hooks failed: {type(error).__name__}: {error}"]


def _tell(view: ExperimentView, state: ExperimentState, hooks: Sequence[Hook]) -> list[str]:
    wanted = [hook for hook in hooks if state.value in hook["states"]]
    if not wanted:
        return []
    news = News.of(view, state)
    claim = view.folder.notified / f"{state.value}-{view.search.submissions}.json"
    make_folder(claim.parent)
    record = {"state": state.value, "host": news.host, "time": time.time()}
    if not write_first(claim, json_text(claim, {**record, "hooks": None})):
        return []
    problems = _send(wanted, news)
    sent = [{"hook": delivery.named(hook), "problem": problem} for hook, problem in zip(wanted, problems, strict=True)]
    write_json(claim, {**record, "hooks": sent})
    return [
        f"notifying {entry['hook']} of {state.value} failed: {entry['problem']}" for entry in sent if entry["problem"]
    ]


def _send(hooks: Sequence[Hook], news: News) -> list[str | None]:
    """Notify all hooks in parallel; return the error of each, None for success."""
    problems: list[str | None] = [f"no answer within {delivery.TIME_LIMIT_S:g} s"] * len(hooks)

    def send(number: int) -> None:
        try:
            delivery.send(hooks[number], news)
            problems[number] = None
        except HookError as error:
            problems[number] = str(error)
        except Exception as error:  # without its text, which may contain a secret such as the address of a webhook
            problems[number] = type(error).__name__

    # daemon threads: a hook that hangs, for instance in a DNS query, must not keep the process from exiting
    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(len(hooks))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + delivery.TIME_LIMIT_S + LEEWAY_S
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return list(problems)  # a copy: a thread that is late still changes the list
