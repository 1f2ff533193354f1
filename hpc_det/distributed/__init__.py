"""Inside a rank: collectives, the agreement to stop, metrics and random states."""
