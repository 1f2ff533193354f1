"""What every rank needs: the gang's collectives, the agreement to stop, checkpoints, metrics."""
