"""The run folder: every file name in one place, one writer per file, append or atomic rename."""
