"""PBS: its commands, their answers, its flags and its queue."""
