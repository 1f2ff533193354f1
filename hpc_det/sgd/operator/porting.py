"""Names that RaySGD operators import from ray.util.sgd.utils; hpc_det itself does not use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpc_det.node.network import free_port as find_free_port
from hpc_det.sgd.operator.options import BadArgument

__all__ = ["find_free_port", "override"]

Method = TypeVar("Method", bound=Callable[..., object])


def override(cls: type) -> Callable[[Method], Method]:
    """Return a decorator that checks that the decorated method overrides a method of `cls`.

    Raises BadArgument, a ValueError, if `cls` has no attribute of that name.
    """

    def checked(method: Method) -> Method:
        if method.__name__ not in dir(cls):
            raise BadArgument(f"@override: {cls.__name__} has no method {method.__name__}; correct the method's name")
        return method

    return checked
