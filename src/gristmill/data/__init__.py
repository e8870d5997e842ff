"""Floor 5: from token files to batches."""
