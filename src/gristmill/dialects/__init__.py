"""The command lines of other systems, as settings of a run."""
