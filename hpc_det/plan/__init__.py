"""From configuration and cluster profile to a JobPlan: effective configuration, multirun points, pools, containers."""
