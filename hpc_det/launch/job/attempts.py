"""The attempts of a job at one trial, until the trial is done or waits for more work, or the job must be requeued.

The worker's process on the first node runs them, and is the only writer of the trial's journal. It runs no rank, so it
survives when all ranks and agents are dead, and decides from facts: the ranks' outcome, the noted failures, the stop
request, the scheduler's answers.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_det.errors import count
from hpc_det.launch.job.agents import LOOK_S, Agents
from hpc_det.launch.job.limits import JobClock, Space
from hpc_det.launch.job.resubmit import Exclusions
from hpc_det.launch.log_tail import size_of, written_since
from hpc_det.launch.orders import Order
from hpc_det.node import full_disk
from hpc_det.node.installation import Replaced
from hpc_det.node.json_files import read_json
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, end_other_sessions
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision, decide, repeats_failure
from hpc_det.schedulers.scheduler import JobState, run_command, scheduler
from hpc_det.store.attempt import Failure, Reason, failure_now, first_failure, note_failure, read_stop, request_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.log_lines import say, say_attempt_begins

if TYPE_CHECKING:
    from hpc_det.launch.job.causes import AttemptFacts

HANDOVER_POLL_S = 0.5
"""Seconds between two polls of the journal and the signals while the job waits."""
ASK_EVERY_S = 30.0
"""Seconds between two queries of the scheduler for the job of the trial's former gang."""
NO_NEWS_S = 150.0
"""Seconds without an answer about a job, as on nodes without the scheduler's commands, after which its gang counts as
dead.

By then the longest save is over, and later commits are refused (`store.journal.Journal.insist_on_last`).
"""
LEAVE_S = 30.0
"""Seconds for the agents' launcher to exit after the loss of a node; srun waits for the node for minutes."""
_BLAMED = {Cause.FAILED, Cause.HUNG, Cause.UNHEALTHY, Cause.NODE_LOST, Cause.DISK_FULL, Cause.SCHEDULER_AWAY}
"""Causes for which the journal names the first failure."""


class Attempts:
    """The attempts of one job at one trial."""

    def __init__(
        self,
        trial: TrialFolder,
        worker: int,
        agents: Agents,
        signals: SignalPipe,
        heard: list[signal.Signals],
    ) -> None:
        """`signals`: this process's stop signals and CHLD.

        `heard`: the stop signals received before. A signal that came too late for an attempt applies to the next.
        """
        self._trial = trial
        self._worker = worker
        self._agents = agents
        self._plan = JobPlan.of(trial.experiment())
        self._exclusions = Exclusions(trial, self._plan)
        self._journal = Journal(trial.journal)
        self._scheduler = scheduler(self._plan.scheduler)
        self._job_id = self._scheduler.job_id(os.environ)
        self._signals = signals
        self._log_began = 0
        """Bytes in the trial's log when the attempt started."""
        self._heard = heard
        self._since_loss: AwakeClock | None = None
        """A clock that was started when this process noticed the loss of a node; None if no node was lost."""
        self._space = Space(trial.checkpoints)

    def run(self) -> Action:
        """Run attempts and return the last decision, REQUEUE only if the scheduler has a queue.

        Raises Overtaken, and Replaced between two attempts.
        """
        with closing(selectors.DefaultSelector()) as self._selector, self._agents.waking(self._selector):
            self._selector.register(self._signals.fd, selectors.EVENT_READ)
            try:
                with full_disk.waited_for(self._waits_to_write):
                    return self._run_in_turn()
            except OSError as error:
                if not (full_disk.cause_in(error) and self._scheduler.has_queue):
                    raise
                say(f"the disk is full, so the job exits without writing its journal: {error}")
                return Action.REQUEUE

    def _run_in_turn(self) -> Action:
        """Wait for the trial's former gang, then run attempts."""
        self._await_former_gang()
        self._listen()  # signals since the last check
        if self._heard and self._scheduler.has_queue:
            return Action.REQUEUE
        return self._run()

    def _run(self) -> Action:
        """Run attempts until the trial is over or the job must exit; return the last decision. Raises Replaced."""
        self.close_interrupted()
        if over := self._final_verdict():
            say(f"this trial is over, so nothing is started: {over[0].value}: {over[1]}")
            return over[0]
        while True:
            if self._agents.are_outdated and not self._heard:
                raise Replaced
            decision = self._attempt(self._journal.last_attempt() + 1)
            if not self._goes_on_here(decision.action):
                return decision.action
            if not self._space.is_wanted:
                continue
            if self._heard and not self._scheduler.has_queue:
                return Action.GIVE_UP  # the attempt that took the signal for a request to cancel could not record it
            if not self._space.comes(self._rests, self._is_told_to_stop):
                return Action.REQUEUE

    def refuse(self, why: str) -> Action:
        """Record an attempt that fails at once, for a trial that can never start, and return the decision."""
        number = self._journal.last_attempt() + 1
        self._journal.started(number, self._job_id, self._worker)
        failure = failure_now(None, why, user_error=True)
        note_failure(self._trial, number, failure)
        return self._end(number, Cause.FAILED, failure).action

    def _goes_on_here(self, action: Action) -> bool:
        """Return whether this job makes the next attempt, as it does without a queue even after a preemption."""
        return action is Action.RESTART or (action is Action.REQUEUE and not self._scheduler.has_queue)

    def _waits_to_write(self, error: OSError) -> bool:
        """Wait before a write to a full disk is retried; return False after a stop signal."""
        return not self._heard and self._rests(self._space.next_pause_s(error)) and not self._heard

    def _is_told_to_stop(self) -> bool:
        """Return whether a stop signal was received, or a stop request for the next attempt exists."""
        return bool(self._heard) or read_stop(self._trial.stop, self._journal.last_attempt() + 1) is not None

    def _rests(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for `seconds`, or until `until` returns True; return False if the job has to exit."""
        clock = JobClock(self._scheduler.ends_at(self._plan, os.environ, run_command), self._plan, self._trial.saves)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not until():
            self._selector.select(timeout=min(left, HANDOVER_POLL_S))
            self._listen()
            if self._heard or clock.rings():
                # Without a queue the job does not exit: the next attempt takes the signal for a request to cancel.
                return not self._scheduler.has_queue
        return True

    def _await_former_gang(self) -> None:
        """Wait while another worker's gang still writes this trial, or until a stop signal to a job with a queue."""
        # The search assigns a trial again as soon as its result is reported, while the former worker may still save.
        ask_at = began = time.monotonic()
        while (former := self._journal.open_job()) and former[0] != self._worker:
            if time.monotonic() >= ask_at:
                status = self._scheduler.status([former[1]], run_command)[former[1]]
                has_no_news = status.state is JobState.UNKNOWN and time.monotonic() - began < NO_NEWS_S
                if status.state is not JobState.RUNNING and not has_no_news:  # a queued job writes nothing, either
                    return
                say(f"waiting for worker {former[0]}, which is still saving this trial")
                ask_at = time.monotonic() + ASK_EVERY_S
            self._selector.select(timeout=HANDOVER_POLL_S)
            self._listen()
            if self._heard and self._scheduler.has_queue:
                return

    def _final_verdict(self) -> tuple[Action, str] | None:
        """Return the decision that has ended the trial, with its reason; None if the trial is not over."""
        verdict = self._journal.verdict()
        return verdict[1:] if verdict and verdict[1] in (Action.DONE, Action.GIVE_UP) else None

    def close_interrupted(self) -> None:
        """Record the end of an earlier attempt whose node was lost or whose job was killed before it could be
        recorded.
        """
        attempt = self._journal.open_attempt()
        if attempt is None:
            return
        self._end(attempt, self._facts(attempt).cause_of_silence(), None, late=True)

    def _attempt(self, number: int) -> Decision:
        """Run attempt `number` and return the decision about what follows."""
        self._trial.remove_abandoned()
        self._journal.started(number, self._job_id, self._worker)
        if self._heard:
            self._on_stop_signal(number)
        if stop := read_stop(self._trial.stop, number):  # requested before the start
            return self._end(number, self._facts(number).cause_of_stop(stop), None)
        self._log_began = size_of(self._trial.job_log)
        say_attempt_begins(number)
        code = self._run_agents(number)
        self._journal.insist_on_last(number)
        facts = self._facts(number)
        if code or not facts.has_outcome:
            self._note_unreached(number)
        failure = facts.failure(code)
        if failure:
            failure = facts.explained(failure, written_since(self._trial.job_log, self._log_began))
        return self._end(number, facts.cause(code, failure), failure or facts.unexplained(code))

    def _facts(self, number: int) -> AttemptFacts:
        from hpc_det.launch.job.causes import AttemptFacts

        return AttemptFacts(self._trial, self._plan, number)

    def _run_agents(self, number: int) -> int:
        """Have the agents run the attempt, wait until it has ended on all nodes, and return its exit code."""
        self._since_loss = None
        self._agents.begin(Order(trial=str(self._trial.path), attempt=number, worker=self._worker))
        import hpc_det.launch.job.late_imports  # noqa: F401

        clock = JobClock(self._scheduler.ends_at(self._plan, os.environ, run_command), self._plan, self._trial.saves)
        while not self._agents.have_ended and not self._waits_in_vain(number):
            until_it_rings_s = clock.timeout_s()
            self._selector.select(LOOK_S if until_it_rings_s is None else min(until_it_rings_s, LOOK_S))
            if self._listen():
                self._on_stop_signal(number)
            if clock.rings():
                self._on_time_limit(number, clock.ends_at)
        code = self._agents.finish()
        self._hear_agents(number)
        return code

    def _note_unreached(self, number: int) -> None:
        """Note the nodes that were lost without an agent reporting them.

        These are nodes that were lost before their agents started, and nodes that the scheduler called down, which ends
        the agents' launcher without an error.
        """
        if first_failure(self._trial, number) is not None:
            return
        printed = written_since(self._trial.job_log, self._log_began)
        if self._scheduler.was_away(printed):
            message = "no agent could be started: the scheduler did not answer"
            note_failure(self._trial, number, failure_now(None, message, scheduler_away=True))
        lost = self._scheduler.unreached_hosts(printed)
        for host in lost:
            message = "lost: its agent could not be started or could not be reached"
            failure = Failure(rank=None, host=host, time=time.time(), message=message, node_lost=True)
            note_failure(self._trial, number, failure)
        if lost:
            # Ranks that still run on a lost node save if they can, and exit before they meet those of the next attempt.
            self._request_stop(number, "signal", "the job, whose nodes were lost", None)

    def _waits_in_vain(self, number: int) -> bool:
        """Return whether the agents' launcher has waited for a lost node for longer than LEAVE_S.

        Called at least every `LOOK_S` seconds.
        """
        if self._since_loss is None:
            failure = first_failure(self._trial, number)
            if failure is None or not failure.node_lost:
                return False
            self._since_loss = AwakeClock(LOOK_S)
        # The agents of the other nodes have exited by now, unless the job was suspended, which this clock does not
        # count.
        return self._since_loss.seconds() > LEAVE_S

    def _listen(self) -> bool:
        """Handle the agents' messages and record the stop signals that have arrived; return whether there were any."""
        self._agents.turn()
        received = [number for number in self._signals.received() if number in STOP_SIGNALS] + self._agents.signals()
        self._heard += received
        return bool(received)

    def _hear_agents(self, number: int) -> None:
        """Record a stop signal that the scheduler sent to the agents only, during the attempt."""
        stop, failure = read_stop(self._trial.stop, number), first_failure(self._trial, number)
        # After a failure srun itself signals the agents of the other nodes.
        if failure and stop and failure.time < stop.time:
            return
        if stop and stop.reason == "signal" and self._scheduler.has_queue:
            self._heard.append(signal.SIGTERM)

    def _on_time_limit(self, number: int, deadline: float | None) -> None:
        """Request a stop before the job's time limit."""
        if read_stop(self._trial.stop, number):  # the scheduler's own warning came first
            return
        say("the time limit is near: requesting a checkpoint from the ranks")
        self._request_stop(number, "time limit", "the job's clock", deadline)

    def _on_stop_signal(self, number: int) -> None:
        reason: Reason = "signal" if self._scheduler.has_queue else "cancel"
        self._request_stop(number, reason, "a signal to the job", self._plan.end_of_grace())

    def _request_stop(self, number: int, reason: Reason, source: str, deadline: float | None) -> None:
        """Write a stop request to the run folder, where the agents read it if they have received no signal."""
        try:
            stop = request_stop(self._trial.stop, attempt=number, reason=reason, source=source, deadline=deadline)
        except OSError as error:
            say(f"writing the stop request failed, so the agents are sent SIGTERM: {error}")
            self._agents.terminate()
            return
        if stop.reason == "kill":
            end_other_sessions()

    def _end(self, number: int, cause: Cause, failure: Failure | None, *, late: bool = False) -> Decision:
        """Decide what follows, record the end of the attempt, and return the decision.

        `late`: the attempt ended at an unknown earlier time.
        """
        user_error = failure is not None and failure.user_error
        policy = self._log_policy(number) if cause is Cause.FAILED else None
        # A late end means that all agents were killed in turn, so the first lost node is not to blame.
        if cause in (Cause.UNHEALTHY, Cause.NODE_LOST) and not late:
            self._exclusions.of_ill_nodes(number)
        facts = self._facts(number)
        blamed = failure if cause in _BLAMED else None
        end = AttemptEnd(
            cause=cause,
            steps=facts.newest_saved(),
            user_error=user_error,
            too_short=facts.was_too_short(cause, late=late),
            failure=blamed.sentence() if blamed else "",
            log_policy=policy,
        )
        history = [*self._journal.history(), end]
        decision = decide(history, self._plan.max_restarts, self._plan.max_attempts_without_progress)
        is_known = repeats_failure(history)
        if is_known and not repeats_failure(history[:-1]) and decision.action is Action.RESTART:
            decision = replace(decision, why=f"{decision.why}; {self._how_to_end()}")
        self._space.note(end)
        if cause is Cause.FINISHED and facts.shows_no_training:
            self._note_no_training(number, facts.idle_script())
        say(f"attempt {number} ended: {cause.value}, {count(end.steps, 'batch')} in the newest checkpoint")
        if blamed:
            trace = "" if is_known else blamed.traceback.rstrip()
            say("\n".join(filter(None, [f"first failure: {end.failure}", trace])))
        say(f"{decision.action.value}: {decision.why}")
        # The journal comes last, so that the log is complete when the decision can be read.
        nodes = read_json(self._trial.nodes(number)) or []
        self._journal.ended(number, end, decision, end.failure or None, late=late, nodes=nodes)
        return decision

    def _how_to_end(self) -> str:
        """Return what the user can do about an error that comes back, as an error of the code does."""
        trial = f"{self._trial.experiment().id}/{self._trial.id}"
        return (
            f"the attempt before failed with the same error; if the code is the cause, end the trial with "
            f"`hpc-det trial kill {trial}`, and set `max_restarts: 0` for the next one"
        )

    def _note_no_training(self, number: int, idle_script: str | None) -> None:
        """Note that the entrypoint has ended with exit code 0, and hpc_det has seen no training.

        Recorded in the journal only if the script is known not to train; others may train without hpc_det.
        """
        if idle_script:
            self._journal.problem(number, f"nothing was trained: {idle_script}")
        say(
            f"note: {idle_script}"
            if idle_script
            else "note: the entrypoint exited with code 0 without a report or checkpoint of hpc_det; if it was meant "
            "to train a trial class, give module:Class as the entrypoint"
        )

    def _log_policy(self, number: int) -> str | None:
        """Apply the log policies to the logs of the attempt; return the name of one that cancels retries, or None.

        Every match is logged and recorded in the journal, whatever its action.
        """
        rank_logs = dict.fromkeys(sorted(self._trial.rank_log(number, 0).parent.glob("*.log")), 0)
        own_log = {self._trial.job_log: self._log_began} if self._trial.job_log.exists() else {}
        policies = (read_json(self._trial.trial) or {"config": {}})["config"].get("log_policies", [])
        from hpc_det.launch.job.causes import matches

        found = matches(policies, rank_logs | own_log)
        for match in found:
            problem = f"log policy {match.policy!r}: {match.line}"
            say(problem)
            self._journal.problem(number, problem)
            if match.action == "exclude_node":
                self._exclusions.of_node_with_log(number, match.log, problem)
        return next((match.policy for match in found if match.action == "cancel_retries"), None)
