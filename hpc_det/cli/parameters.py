"""Arguments that several commands take."""

from __future__ import annotations

import os

import click

from hpc_det.store.folders import ExperimentFolder, ExperimentStore
from hpc_det.store.root import state_root


def store() -> ExperimentStore:
    return ExperimentStore(state_root(os.environ))


class ExperimentId(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2, and not before
    """An id on the command line, an existing experiment in the command."""

    name = "id"

    def convert(
        self, value: str | ExperimentFolder, param: click.Parameter | None, ctx: click.Context | None
    ) -> ExperimentFolder:
        if isinstance(value, ExperimentFolder):
            return value
        if not value.isdecimal() or len(value) > 9:
            self.fail(f"{value!r} is no experiment id; expected a number such as 12", param, ctx)
        return store().existing(int(value))


experiment_argument = click.argument("experiment", metavar="ID", type=ExperimentId())
