"""Which documents, paragraphs and lines of a corpus are duplicates of earlier ones."""
