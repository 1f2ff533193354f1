"""What a scheduler is, and each of them: command builders, output parsers, one table of states. A file each."""
