"""Once per node: the job, its node agents, the launchers and the way into a rank. Standard library only."""
