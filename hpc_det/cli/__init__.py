"""hpc-det: one module per command, named after it, which is imported when the command is called and not before."""
