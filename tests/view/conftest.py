from __future__ import annotations

from tests.cli.conftest import code as code
from tests.cli.conftest import config as config
from tests.cli.conftest import hpc_det as hpc_det
from tests.cli.conftest import life as life
from tests.cli.conftest import root as root
from tests.cli.conftest import scheduler as scheduler
from tests.cli.conftest import slurm_commands as slurm_commands
from tests.cli.conftest import umask as umask
