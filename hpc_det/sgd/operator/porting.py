"""What RaySGD's operators import from its utils, and nothing here needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpc_det.node.network import free_port as find_free_port
from hpc_det.sgd.operator.options import BadArgument

__all__ = ["find_free_port", "override"]

Method = TypeVar("Method", bound=Callable[..., object])


def override(cls: type) -> Callable[[Method], Method]:
    """Decorator for a method that overrides one of `cls`. Raises BadArgument where there is none of that name."""

    def checked(method: Method) -> Method:
        if method.__name__ not in dir(cls):
            raise BadArgument(f"{method.__name__} overrides no method of {cls.__name__}")
        return method

    return checked
