"""Errors of users' mistakes that are also of the built-in kind which RaySGD raised for them."""

from __future__ import annotations

from hpc_det.errors import UsageError


class BadArgument(UsageError, ValueError):
    """A value that an argument cannot have."""


class BadModel(UsageError, AssertionError):
    """What was registered as a model is none."""


class NotSet(UsageError, RuntimeError):
    """A default loop needs something that `setup` has not put there."""


class MissingLoader(NotSet, ValueError):
    """Training or validation without the loader for it."""


class MissingApex(UsageError, ImportError):
    """use_fp16="apex" without apex."""
