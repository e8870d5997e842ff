"""Floor 3: starting the processes of a run and keeping them together."""
