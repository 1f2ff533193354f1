"""The content of a trial's checkpoint, saved and loaded, and the trace that compares two runs."""
