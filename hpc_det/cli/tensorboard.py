"""hpc-det tensorboard: the event files of experiments and trials, by names that people know."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click

from hpc_det.cli.arguments import any_experiment, any_trial
from hpc_det.cli.output import at_once
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.store.folders import TrialFolder
from hpc_det.view.state import ExperimentView


def trials_of(text: str) -> list[TrialFolder]:
    """The trials of experiments, and single trials, with commas between; each once."""

    def trials(part: str) -> list[TrialFolder]:
        return [any_trial(part)] if "/" in part else any_experiment(part).trials()

    found = at_once(list(dict.fromkeys(text.split(","))), trials)
    return list(dict.fromkeys(trial for its in found for trial in its))


@click.command()
@click.argument("trials", metavar="[OWNER:]ID|EXPERIMENT/TRIAL[,...]", type=trials_of)
@click.option("--port", type=click.IntRange(0, 65535), help="By default 6006, or the next that is free; 0 is any.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
def tensorboard(trials: list[TrialFolder], port: int | None, host: str) -> None:
    """Show experiments or trials in TensorBoard.

    It listens until Ctrl-C, on this machine alone: whoever reaches the port sees everything. From elsewhere, forward
    the port with `ssh -L 6006:localhost:6006`. Trials that begin later are not shown.

    \b
    Example:
      hpc-det tensorboard 12/1,12/7 --port 0
      12-digits/trial-1 and 1 more: http://127.0.0.1:43121/ (Ctrl-C ends it)
    """
    runs = _named([trial for trial in trials if trial.tensorboard.is_dir()])
    if not runs:
        raise UsageError("no trial of these has written anything for TensorBoard; they do so with their first report")
    with suppress(KeyboardInterrupt), ended_by_signals(), _linked(runs) as folder:
        url = _started(folder, host, port)
        click.echo(f"{_in_words(runs)}: {url} (Ctrl-C ends it)")
        while True:
            time.sleep(1)  # not for ever, as pause(2) does after a signal that came just before it


def _named(trials: Sequence[TrialFolder]) -> dict[str, Path]:
    """The files of each under a name such as `12-digits/trial-7`."""
    experiments = {trial.experiment() for trial in trials}
    names = {one: ExperimentView(one).about().name.replace("/", "_") for one in experiments}
    return {f"{(one := trial.experiment()).id}-{names[one]}/trial-{trial.id}": trial.tensorboard for trial in trials}


def _in_words(runs: Mapping[str, Path]) -> str:
    first = next(iter(runs))
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more"


@contextmanager
def _linked(runs: Mapping[str, Path]) -> Iterator[Path]:
    """A folder with a link to each run under its name, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="hpc-det-tensorboard-") as folder:
        for name, target in runs.items():
            link = Path(folder, name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(target.absolute(), target_is_directory=True)
        yield Path(folder)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A terminal that goes away, and whoever ends processes, mean the same as Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _started(folder: Path, host: str, port: int | None) -> str:
    """TensorBoard in a thread of this process; its address. Raises HpcDetError where it cannot listen."""
    from tensorboard import program  # type: ignore[import-untyped]

    board = program.TensorBoard()
    where = ["--host", host, *([] if port is None else ["--port", str(port)])]
    board.configure(argv=["tensorboard", "--logdir", str(folder), *where])
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise HpcDetError(f"TensorBoard does not start: {error}; name another --port or --host") from None
    return url
