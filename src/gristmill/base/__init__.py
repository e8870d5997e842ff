"""Floor 0: errors, units, files and processes; knows nothing of the rest."""
