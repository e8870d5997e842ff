"""From documents to token sets."""
