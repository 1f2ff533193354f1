"""At which call of `may_stop` a rank stops: all ranks of a gang at the same one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hpc_det.errors import UsageError


class Agreement(Protocol):
    def should_stop(self) -> bool:
        """The same for all ranks at the same call."""

    def give_notice(self) -> None:
        """A stop was asked for. Any rank may say so, and more than once."""


class Alone:
    """The only rank agrees with itself."""

    def __init__(self) -> None:
        self._noticed = False

    def should_stop(self) -> bool:
        return self._noticed

    def give_notice(self) -> None:
        self._noticed = True


class InGang:
    """Over messages of the ranks, which are opened over the process group."""

    def __init__(self, env: Mapping[str, str]) -> None:
        from hpc_det.distributed.collectives import Distributed
        from hpc_det.distributed.preempt import StopAgreement

        self._messages = Distributed.from_env(env).messages
        self._stop = StopAgreement(self._messages)

    def should_stop(self) -> bool:
        return self._stop.should_stop()

    def give_notice(self) -> None:
        from hpc_det.distributed.preempt import give_notice

        give_notice(self._messages)


def agreement(env: Mapping[str, str]) -> Agreement:
    """Of the gang that `env` describes. Raises UsageError where its ranks cannot speak with each other."""
    if int(env["WORLD_SIZE"]) == 1:
        return Alone()
    import torch.distributed as dist

    if not dist.is_initialized():
        raise UsageError(
            "may_stop: the ranks of a gang agree over the process group; call torch.distributed.init_process_group "
            "before"
        )
    return InGang(env)
