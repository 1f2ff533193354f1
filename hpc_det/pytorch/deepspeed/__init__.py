"""DeepSpeedTrial, its context and what they are configured with. Alone here deepspeed is imported."""

from hpc_det.pytorch.deepspeed.config import get_ds_config_from_hparams, overwrite_deepspeed_config
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.trial import DeepSpeedTrial
from hpc_det.pytorch.model_parallel import ModelParallelUnit, make_data_parallel_mpu, make_deepspeed_mpu

__all__ = [
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "ModelParallelUnit",
    "get_ds_config_from_hparams",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]
