"""Batch inference: every record of a data set is processed once, on all ranks, through stops and kills."""

from hpc_det.pytorch.inference.output_folder import Part
from hpc_det.pytorch.inference.process import torch_batch_process
from hpc_det.pytorch.inference.processor import TorchBatchProcessor, TorchBatchProcessorContext
from hpc_det.pytorch.inference.values import Outputs

__all__ = ["Outputs", "Part", "TorchBatchProcessor", "TorchBatchProcessorContext", "torch_batch_process"]
