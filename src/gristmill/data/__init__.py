"""From token files to batches."""
