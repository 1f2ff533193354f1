"""What will happen: an effective experiment on a cluster, decided once and frozen. No I/O."""
