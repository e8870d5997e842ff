"""Floor 3: raw text from anywhere, tokenizers, and the preparation of token sets."""
