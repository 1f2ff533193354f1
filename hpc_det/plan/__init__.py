"""The configuration meets the site: effective configuration, points of a multirun, pools, containers -> JobPlan."""
