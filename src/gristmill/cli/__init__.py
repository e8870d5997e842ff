"""Floor 12: the command line."""
