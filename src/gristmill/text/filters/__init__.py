"""Which documents are kept, and what they contain."""
