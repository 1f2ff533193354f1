"""One process carries out an order to kill, or another one if the first is killed before; the functions of orders
exist.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.kills import moments, orders, plans, sgd_plans

CLAIMS = """
import sys, time
from pathlib import Path
from tests.chaos.kills import orders
print(orders.claim(Path(sys.argv[1]), 0), flush=True)
time.sleep(600)
"""


@pytest.mark.integration
def test_the_claim_of_a_process_lapses_when_it_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CLAIMS, tmp_path], stdout=subprocess.PIPE, text=True) as claimant:
        assert claimant.stdout
        assert claimant.stdout.readline() == "True\n"
        assert not orders.claim(tmp_path, 0)
        claimant.kill()
    assert orders.claim(tmp_path, 0)


def test_an_order_that_was_carried_out_is_claimed_by_nobody(tmp_path: Path) -> None:
    orders.note_done(tmp_path, 0)
    assert not orders.claim(tmp_path, 0)


FUNCTIONS = [
    function
    for plan in (plans, sgd_plans)
    for time in vars(plan).values()
    if isinstance(time, plans.Time)
    for function in time.functions
    if function.startswith("hpc_det.")
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_that_carries_orders_out_is_where_the_plans_say(function: str) -> None:
    module = importlib.import_module(function.partition(":")[0])
    owner, name = moments.owner_of(function, module)
    assert name in vars(owner)
    assert "__main__" not in inspect.getsource(module)  # `python -m` executes such a module a second time, unchanged
