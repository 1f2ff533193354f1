"""What the files of an experiment say, and the scheduler where they do not settle it. Nothing here writes."""
