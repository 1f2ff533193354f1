"""Jobs on this machine, without a scheduler."""
