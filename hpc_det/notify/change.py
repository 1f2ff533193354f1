"""A change of an experiment's state, and that hooks are told of it once.

Whoever changes the state tells: a job's worker as it begins, and the last one as it leaves; `pause`, `cancel` and
`kill`, where no worker is left to do it. Of several that come at the same moment the first to make the claim, a file
`STATE-N.json` for the N-th submission of the experiment, does it. One that dies while it tells is not replaced: rather
nobody is told than somebody twice.

Nothing that goes wrong with a hook concerns the training or its state.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpc_det.node.files import make_folder, write_first
from hpc_det.node.json_files import read_json, write_json
from hpc_det.notify import delivery
from hpc_det.notify.delivery import HookError, News
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentState, ExperimentView

Hook = Mapping[str, Any]
_REST = [state for state in ExperimentState if state is ExperimentState.PAUSED or state.is_final]
LEEWAY_S = 2.0
"""After its time limit, for a hook that ends what it has started."""


def tell_running(experiment: ExperimentFolder) -> list[str]:
    """It has begun. What did not work, a sentence for each hook."""
    return _guarded(experiment, (ExperimentState.RUNNING,), lambda view: ExperimentState.RUNNING)


def tell_rest(experiment: ExperimentFolder) -> list[str]:
    """The same, where it has come to rest: it is paused, or has ended."""
    return _guarded(experiment, _REST, lambda view: view.settled())


@contextmanager
def hooks_told(experiment: ExperimentFolder, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Around the work of a worker, which waits for no hook before it begins, nor before it goes back into the queue.

    Before it leaves for good it calls what is yielded, which waits until they are told that it has begun: whoever
    leaves last tells the end, and nobody shall hear of that first.
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
    """Whatever happens. The journal is read where a hook wants a state that is `possible` now."""
    try:
        hooks = (read_json(experiment.effective) or {}).get("notify") or []
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
    if not write_first(claim, json.dumps({**record, "hooks": None})):
        return []
    problems = _send(wanted, news)
    told = [{"hook": delivery.named(hook), "problem": problem} for hook, problem in zip(wanted, problems, strict=True)]
    write_json(claim, {**record, "hooks": told})
    return [
        f"notifying {entry['hook']} of {state.value} failed: {entry['problem']}" for entry in told if entry["problem"]
    ]


def _send(hooks: Sequence[Hook], news: News) -> list[str | None]:
    """To all at once. Why it did not work, for each; None where it did."""
    problems: list[str | None] = [f"no answer within {delivery.TIME_LIMIT_S:g} s"] * len(hooks)

    def send(number: int) -> None:
        try:
            delivery.send(hooks[number], news)
            problems[number] = None
        except HookError as error:
            problems[number] = str(error)
        except Exception as error:
            problems[number] = type(error).__name__

    # Not even a name that is looked up forever keeps a process from ending.
    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(len(hooks))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + delivery.TIME_LIMIT_S + LEEWAY_S
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return list(problems)
