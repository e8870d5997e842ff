"""Floor 2: documents of token ids on disk, whatever the format."""
