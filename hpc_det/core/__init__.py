"""The Core API: what any training loop needs to be stopped, saved and resumed."""
