from __future__ import annotations

from tests.cli.conftest import life as life
from tests.cli.conftest import root as root
from tests.cli.conftest import scheduler as scheduler
from tests.cli.conftest import umask as umask
from tests.client.conftest import searched as searched
