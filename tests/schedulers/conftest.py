from __future__ import annotations

from tests.stub import stub as stub
