from __future__ import annotations

from tests.notify.receiver import receiver as receiver
from tests.stub import stub as stub
