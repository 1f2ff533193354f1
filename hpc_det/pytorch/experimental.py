"""Batch inference under the module name that Determined has."""

from hpc_det.pytorch.inference import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process

__all__ = ["TorchBatchProcessor", "TorchBatchProcessorContext", "torch_batch_process"]
