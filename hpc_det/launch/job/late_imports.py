"""The modules that a job needs only after its ranks have started.

It imports this module while they start. The start does not wait for these imports, and an upgrade of the installation
during the training does not mix two versions in the job.
"""

import hpc_det.checkpoint.committed
import hpc_det.checkpoint.staging
import hpc_det.checkpoint.storage
import hpc_det.launch.job.causes
import hpc_det.launch.printed_causes
import hpc_det.schedulers.own_jobs  # noqa: F401
