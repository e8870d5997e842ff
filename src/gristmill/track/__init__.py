"""Floor 2: the run folder, the records of a run, and the places they are written to."""
