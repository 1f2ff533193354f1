"""`determined.lightning`, which contains only `experimental`."""
