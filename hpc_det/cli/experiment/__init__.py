"""hpc-det experiment: create experiments and look after them."""

from hpc_det.cli.experiment import about as about
from hpc_det.cli.experiment import begin as begin
from hpc_det.cli.experiment import keep as keep
from hpc_det.cli.experiment import look as look
from hpc_det.cli.experiment import set_ as set_
from hpc_det.cli.experiment import steer as steer
from hpc_det.cli.experiment import throughput as throughput
from hpc_det.cli.experiment import verify as verify
from hpc_det.cli.experiment.group import experiment as experiment
