"""Sweeps of anyone's `@hydra.main` app, as an experiment of hpc_det with a trial for each of Hydra's jobs.

launcher    on the login node: Hydra's part, which composes, saves and submits
app         on the compute nodes: a rank, which runs the app's function with its saved config
"""
