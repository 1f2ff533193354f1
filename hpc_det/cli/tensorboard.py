"""hpc-det tensorboard: show the event files of experiments and trials under readable names."""

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
    """Return the trials of comma-separated experiments and trials, each once."""

    def trials(part: str) -> list[TrialFolder]:
        return [any_trial(part)] if "/" in part else any_experiment(part).trials()

    found = at_once(list(dict.fromkeys(text.split(","))), trials)
    return list(dict.fromkeys(trial for its in found for trial in its))


@click.command()
@click.argument("trials", metavar="[OWNER:]ID|EXPERIMENT/TRIAL[,...]", type=trials_of)
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port; default: 6006 or the next free one; 0: any free port."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
def tensorboard(trials: list[TrialFolder], port: int | None, host: str) -> None:
    """Show experiments or trials in TensorBoard.

    It runs until Ctrl-C and by default listens only on this machine: anyone who can reach the port sees everything.
    From another machine, forward the port with `ssh -L 6006:localhost:6006`. Trials that start later are not shown.

    \b
    Example:
      hpc-det tensorboard 12/1,12/7 --port 0
      12-digits/trial-1 and 1 more: http://127.0.0.1:43121/ (Ctrl-C ends it)
    """
    runs = _named([trial for trial in trials if trial.tensorboard.is_dir()])
    if not runs:
        raise UsageError(
            "none of these trials has written TensorBoard files yet; a trial writes them with its first report"
        )
    with suppress(KeyboardInterrupt), ended_by_signals(), _linked(runs) as folder:
        url = _started(folder, host, port)
        click.echo(f"{_in_words(runs)}: {url} (Ctrl-C ends it)")
        while True:
            time.sleep(1)  # not pause(2), which would block forever after a signal that arrived just before it


def _named(trials: Sequence[TrialFolder]) -> dict[str, Path]:
    """Return the folder with each trial's event files, keyed by a name such as `12-digits/trial-7`."""
    experiments = {trial.experiment() for trial in trials}
    names = {one: ExperimentView(one).about().name.replace("/", "_") for one in experiments}
    return {f"{(one := trial.experiment()).id}-{names[one]}/trial-{trial.id}": trial.tensorboard for trial in trials}


def _in_words(runs: Mapping[str, Path]) -> str:
    first = next(iter(runs))
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more"


@contextmanager
def _linked(runs: Mapping[str, Path]) -> Iterator[Path]:
    """Yield a temporary folder with a link to each run under its name."""
    with tempfile.TemporaryDirectory(prefix="hpc-det-tensorboard-") as folder:
        for name, target in runs.items():
            link = Path(folder, name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(target.absolute(), target_is_directory=True)
        yield Path(folder)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt inside the block on SIGHUP (the terminal was closed) and SIGTERM, as on Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _started(folder: Path, host: str, port: int | None) -> str:
    """Start TensorBoard in a thread of this process and return its URL; raise HpcDetError if it cannot listen."""
    from tensorboard import program  # type: ignore[import-untyped]

    board = program.TensorBoard()
    where = ["--host", host, *([] if port is None else ["--port", str(port)])]
    board.configure(argv=["tensorboard", "--logdir", str(folder), *where])
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise HpcDetError(f"TensorBoard cannot start: {error}; pass another --port or --host") from None
    return url
