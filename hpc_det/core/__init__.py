"""The public Core API: what any training loop needs to hear a stop, save, resume, report and search."""
