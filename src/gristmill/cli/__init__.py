"""Floor 11: the command line."""
