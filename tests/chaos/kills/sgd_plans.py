"""Random orders for a program with a TorchTrainer: its workers, its node agent with the fork server, and the
program.
"""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.kills.plans import NO_RANK, Kill, Planner, Time, Victim

A_WORKER, WORKERS = Victim(("a worker",), ()), Victim(("workers",), ())
FORK_SERVER, AGENT = Victim(("fork server",), ()), Victim(("node agent",), ())
DRIVER = Victim(("driver",), (), ends_job=True)
ALL_OF_IT = Victim(("everything",), (), ends_job=True)
ALL = (A_WORKER, WORKERS, FORK_SERVER, AGENT, DRIVER, ALL_OF_IT)

IN_WORKERS = Time(("tests.sgd.trained:Linear.train_batch",), most=16, rank=NO_RANK)
VALIDATES = Time(("tests.sgd.trained:Linear.validate_batch",), rank=NO_RANK)
BEGINS = Time(("tests.sgd.trained:Linear.setup",), rank=NO_RANK)
IS_KEPT = Time(("hpc_det.checkpoint.snapshots:keep",), rank=NO_RANK)
BETWEEN_CALLS = Time(
    ("hpc_det.sgd.driver.elastic:ElasticGang._take", "hpc_det.sgd.driver.elastic:ElasticGang._snapshot"), rank=NO_RANK
)


def random_ones(seed: int) -> list[Kill]:
    """Kill three times, perhaps the second time while the program handles the first; the last time at any moment until
    the end. A new worker has 8 batches in the last epoch.
    """
    planner = Planner(seed)
    first, second = planner.any(ALL, [BEGINS, IN_WORKERS]), planner.any(ALL, [IN_WORKERS, IS_KEPT, BETWEEN_CALLS])
    last = planner.any(ALL, [replace(IN_WORKERS, most=8), IS_KEPT, VALIDATES])
    return [kill.at_once for kill in (first, second, last)]
