"""hpc-det, one file per command group. A command's own modules are imported when it is called, not before."""
