"""What stands on each node for a driver (hpc_det.sgd): an agent that stays while gangs of ranks come and go."""
