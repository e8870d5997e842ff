"""Gristmill: text in, language model out."""
