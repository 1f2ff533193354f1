"""What limits the throughput of a training: short runs of it, and what they show."""
