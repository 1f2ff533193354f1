"""Checks of the arguments `config` and `loggers` of `init`, by the schema of experiment files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from hpc_det.errors import MISSING, Problem, UsageError


def check_arguments(config: Mapping[str, Any], keys: Set[str]) -> None:
    """Check the values of those of `keys` that `config` has. A key below them may be missing, even a required one.

    `config`: both arguments as one map. Raises UsageError with all problems.
    """
    given = keys & config.keys()
    if not given:
        return
    # Imported late: pydantic and the schema take half a second, and most runs outside a job have no configuration.
    from pydantic import ValidationError

    from hpc_det.config.loggers import logger_problems
    from hpc_det.config.problems import render, schema_problems
    from hpc_det.config.schema import Experiment

    # As JSON will store it: the schema accepts no tuple in place of a list.
    tree = json.loads(json.dumps({key: config[key] for key in config if key in given}, default=str))
    problems: list[Problem] = []
    try:
        Experiment.model_validate(tree)
    except ValidationError as error:
        found = schema_problems(Experiment, error)
        problems += (problem for problem in found if problem.what != MISSING or "[" in problem.path)
    problems += logger_problems(tree)
    if lines := render(problems, lambda path: "the arguments of init"):
        raise UsageError(lines)
