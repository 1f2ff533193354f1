"""At which call of `may_stop` a rank stops: all ranks of a gang at the same one."""

from __future__ import annotations

import hashlib
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
    """Over the store of the process group, on connections of its own."""

    def __init__(self, secret: str, env: Mapping[str, str]) -> None:
        from hpc_det.core.distributed import Distributed
        from hpc_det.core.preempt import StopAgreement

        distributed = Distributed.from_env(env)
        # Whoever reaches the store can read its keys, and the secret is for the ranks alone.
        self._prefix = f"stop/{hashlib.sha256(secret.encode()).hexdigest()}"
        self._speaking = distributed.side_store()
        self._stop = StopAgreement(distributed.rank, distributed.size, distributed.side_store(), self._prefix)

    def should_stop(self) -> bool:
        return self._stop.should_stop()

    def give_notice(self) -> None:
        from hpc_det.core.preempt import give_notice

        give_notice(self._speaking, self._prefix)


def agreement(secret: str, env: Mapping[str, str]) -> Agreement:
    """Of the gang that `env` describes. Raises UsageError where its ranks cannot speak with each other."""
    if int(env["WORLD_SIZE"]) == 1:
        return Alone()
    import torch.distributed as dist

    if not dist.is_initialized():
        raise UsageError(
            "may_stop: the ranks of a gang agree over the process group; call torch.distributed.init_process_group "
            "before"
        )
    return InGang(secret, env)
