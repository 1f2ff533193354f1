"""What a checkpoint of a trial holds: saving and loading it, and the trace that compares two runs."""
