"""The node agents of a driver (hpc_det.sgd), which keep running while gangs of ranks are formed and ended."""
