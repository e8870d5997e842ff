"""Conversations: read from JSON lines, written as text by a template, and as ids."""
