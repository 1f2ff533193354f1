"""The files of experiments and runs: names, formats and writers. Files are appended to, or replaced by a rename."""
