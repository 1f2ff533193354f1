"""hpc-det top: all experiments on one screen, live. Threads ask files and schedulers; what is shown is plain data."""
