"""Exports a model to the formats of other programs, and checks each before it gets its name."""
