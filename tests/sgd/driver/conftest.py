from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _agents_can_be_forked(_fork_server: None) -> None:
    """Start the fork server for the agents of tests.sgd.local_nodes."""
