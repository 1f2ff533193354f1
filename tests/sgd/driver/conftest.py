from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _agents_can_be_forked(_fork_server: None) -> None:
    """Those of tests.sgd.local_nodes."""
