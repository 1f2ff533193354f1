"""Code that runs inside a rank: collectives, the agreement to stop, metrics and random number generators."""
