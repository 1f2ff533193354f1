"""The process of a trial: python3 -m hpc_det.sgd.tune.trial TRIAL_FOLDER NUMBER

It executes the turns that the driver writes. It saves a checkpoint before it writes the result of the same iteration,
so that after its death another process can continue from the last checkpoint. If it has had no turn for WAITS_S
seconds, it exits, because the driver may have ended.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_det.checkpoint.committed import Committed, committed, newest_good
from hpc_det.checkpoint.committed_folder import delete
from hpc_det.checkpoint.damaged import set_aside
from hpc_det.checkpoint.retention import RESUME_DEPTH, superfluous
from hpc_det.checkpoint.staging import new_staging
from hpc_det.errors import InvalidHP
from hpc_det.node.json_files import read_json, write_json
from hpc_det.sgd.driver.failures import JobLeaves
from hpc_det.sgd.tune.files import DONE, ITERATION, STATE, TuneFolder, TuneTrial, Turn, checkpoint_data
from hpc_det.sgd.tune.trainable import Trainable, merged
from hpc_det.store.metrics import in_json, number_or_nan

WAITS_S, POLL_S = 10.0, 0.02
"""Seconds without a turn after which the process exits, and seconds between two checks for one."""
_STDERR = 2
LEFT, FAILED = 0, 1
"""Exit codes: no more turns, or an exception of the user's code."""


class TrialProcess:
    """A process of a trial, which executes turns."""

    def __init__(self, folder: TuneTrial, process: int) -> None:
        self._folder = folder
        self._process = process
        self._cls, self._objects = TuneFolder(folder.path.parent.parent).read_trainable()
        self._trainable: Trainable | None = None
        self._turn: Turn | None = None
        """The last turn that was executed."""
        self._last: dict[str, Any] = {ITERATION: 0, DONE: False, "time_total_s": 0.0}
        """The last result."""
        self._leaves = False
        """Whether the process exits after the current step, because the node will be taken away."""

    def hear_warning(self, signum: int, frame: FrameType | None) -> None:
        """Handle the notice that the node will be taken away: exit after this step, or at once without a turn."""
        # os.write: print() is not safe in a signal handler that interrupts another print().
        os.write(_STDERR, f"{signal.Signals(signum).name} received: exiting after the current step\n".encode())
        self._leaves = True
        if self._own_turn() is None:  # the trial has no turn for this process: the step's result is not needed
            sys.exit(LEFT)

    def run(self) -> None:
        """Execute turns until none is left for this process."""
        try:
            while turn := self._next_turn():
                self._do(turn)
                self._turn = turn
        finally:
            self._clean_up()

    def _next_turn(self) -> Turn | None:
        """Wait for the next turn and return it; None if the process is to exit."""
        end = time.monotonic() + WAITS_S
        while time.monotonic() < end and not self._leaves:
            turn = self._own_turn()
            if turn is None or self._turn is None or turn.number > self._turn.number:
                return turn
            time.sleep(POLL_S)
        return None

    def _own_turn(self) -> Turn | None:
        """Return the trial's current turn; None if there is none, or if it is for another process."""
        turn = self._folder.read_turn()
        return turn if turn and turn.process == self._process else None

    def _do(self, turn: Turn) -> None:
        """Execute a turn. A new trainable is created if the turn has other hyperparameters or loads a checkpoint."""
        if self._trainable is None or self._turn is None or turn.load or turn.config != self._turn.config:
            self._clean_up()
            self._begin(turn)
        while not (self._last[DONE] or self._last[ITERATION] >= _until(turn) or self._leaves):
            self._iterate(turn)

    def _begin(self, turn: Turn) -> None:
        """Create the trainable and load the checkpoint that the turn starts or continues from.

        It is the trial's own newest one, unless the turn starts from that of another trial and has saved none yet.
        """
        own, state = self._newest()
        if state:
            self._last = state["result"]
        self._folder.append_begin(self._process, self._last[ITERATION])
        if state:
            self._repeat_result()
        trainable = self._trainable = self._cls()
        trainable.trial_folder = self._folder.path
        trainable.setup(merged(self._objects, turn.config))
        trainable.training_iteration = self._last[ITERATION]
        if turn.load and (state is None or state["turn"] < turn.number):
            trainable.load_checkpoint(checkpoint_data(Path(turn.load)))
        elif own:
            trainable.load_checkpoint(checkpoint_data(own.path))

    def _newest(self) -> tuple[Committed | None, dict[str, Any] | None]:
        """Return the newest undamaged checkpoint of the trial and its STATE, or None and None."""
        own, skipped = newest_good(self._folder.checkpoints, set_aside=set_aside)
        for problem in skipped:
            print(f"checkpoint skipped: {problem}", flush=True)
        return own, read_json(own.path / STATE) if own else None

    def _repeat_result(self) -> None:
        """Write the result of the loaded checkpoint again, unless it is the last one in the file."""
        # A process may have died after it saved the checkpoint, and before it wrote the result.
        results = self._folder.results()
        if not results or results[-1][ITERATION] != self._last[ITERATION]:
            self._folder.append(self._last, self._process, None)

    def _iterate(self, turn: Turn) -> None:
        """Train for one iteration, save a checkpoint if one is due, and write the result."""
        assert self._trainable
        self._trainable.training_iteration = self._last[ITERATION]
        began = time.perf_counter()
        metrics = self._trainable.step()
        took_s = time.perf_counter() - began
        # Checked after the step, which may take long: only one process of a trial may write results and checkpoints.
        if self._own_turn() is None:
            raise SystemExit(LEFT)  # the trial has another process now, or is not continued
        iteration = self._last[ITERATION] + 1
        times = {"time_this_iter_s": took_s, "time_total_s": self._last["time_total_s"] + took_s, "time": time.time()}
        result = {**in_json(metrics), ITERATION: iteration, **times}
        result[DONE] = bool(metrics.get(DONE)) or any(
            _reached(result.get(name), end) for name, end in turn.stop.items()
        )
        is_last = result[DONE] or iteration >= _until(turn) or self._leaves
        if is_last or (turn.checkpoint_freq and iteration % turn.checkpoint_freq == 0):
            self._save(turn, result)
        length = turn.stop.get(ITERATION)
        self._folder.append(result, self._process, None if length is None else int(length))
        self._last = result

    def _save(self, turn: Turn, result: dict[str, Any]) -> None:
        """Save and commit a checkpoint, and delete those that are not kept."""
        assert self._trainable
        staging = new_staging(self._folder.checkpoints)
        saved = self._trainable.save_checkpoint(str(staging.partial)) or str(staging.partial)
        state = {"turn": turn.number, "result": result, "data": os.path.relpath(saved, staging.partial)}
        write_json(staging.partial / STATE, state)
        entries: dict[str, Any] = {}
        staging.add_others(entries)
        staging.commit(result[ITERATION], entries)
        self._prune(turn, result)

    def _prune(self, turn: Turn, newest: dict[str, Any]) -> None:
        """Delete all checkpoints but the newest two and the best one."""
        metric, mode = turn.keep.get("metric"), turn.keep.get("mode")
        results = [*self._folder.results(), newest]
        values = {result[ITERATION]: number_or_nan(result.get(metric)) for result in results} if metric else {}
        every = committed(self._folder.checkpoints)
        for checkpoint in superfluous(every, values, smaller_is_better=mode == "min", best=1, latest=RESUME_DEPTH):
            delete(checkpoint.path, hidden=f".partial-{checkpoint.uuid}")

    def _clean_up(self) -> None:
        trainable, self._trainable = self._trainable, None
        if trainable:
            trainable.cleanup()


def _until(turn: Turn) -> float:
    return math.inf if turn.until is None else turn.until


def _reached(value: Any, end: float) -> bool:
    return number_or_nan(value) >= end


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # raises SystemExit, so that the trainable is cleaned up


def main(folder: Path, number: int, warned_by: Iterable[signal.Signals] = ()) -> int:
    """Run process `number` of the trial in `folder`, and return the exit code.

    The exit code is FAILED after an exception of the user's code, which is written to outcome.json. `warned_by`:
    signals that announce the end of the job, after which the process exits at the end of its step.
    """
    trial = TuneTrial(folder)
    process = TrialProcess(trial, number)
    for warning in warned_by:
        signal.signal(warning, process.hear_warning)
    try:
        process.run()
    except JobLeaves:
        write_json(trial.outcome, {"kind": "left"})
        raise
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, process._cls.ended_by):  # without an outcome the driver counts it as a death, and restarts
            raise
        kind = "invalid" if isinstance(error, InvalidHP) else "failed"
        said = traceback.format_exception_only(type(error), error)[-1].strip()
        write_json(trial.outcome, {"kind": kind, "error": said, "traceback": traceback.format_exc()})
        return FAILED
    write_json(trial.outcome, {"kind": "left"})
    return LEFT


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
