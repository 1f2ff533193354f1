"""Adapters of other training libraries to hpc_det.core; each imports its library."""
