"""Values for hyperparameters, drawn from their ranges."""

from __future__ import annotations

import random
from typing import Any


def sample(hyperparameters: dict[str, Any], draws: random.Random | None = None) -> dict[str, Any]:
    """One value for each hyperparameter, keys in sorted order; constants as they are, nested maps recursively.

    The ranges are Determined's: `int` includes its `maxval`; `log` gives base ** exponent, and `minval` and `maxval`
    bound the exponent. Raises ValueError for a type that is none of const, int, double, log, categorical.
    """
    draws = draws or random.Random()
    return {name: _value(hyperparameters[name], draws) for name in sorted(hyperparameters)}


def _value(spec: Any, draws: random.Random) -> Any:
    if not isinstance(spec, dict):
        return spec
    kind = spec.get("type")
    if kind is None:
        return sample(spec, draws)
    if kind == "const":
        return spec["val"]
    if kind == "categorical":
        return draws.choice(spec["vals"])
    if kind == "int":
        return draws.randint(spec["minval"], spec["maxval"])
    if kind == "double":
        return draws.uniform(spec["minval"], spec["maxval"])
    if kind == "log":
        return spec.get("base", 10.0) ** draws.uniform(spec["minval"], spec["maxval"])
    raise ValueError(f"hyperparameter type {kind!r}: expected const, int, double, log or categorical")
