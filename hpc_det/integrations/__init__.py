"""Adapters of hpc_det.core for other training loops."""
