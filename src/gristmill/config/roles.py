"""What a parameter is for: the word that models and optimizers share.

A model says which role each of its parameters plays; an optimizer may treat each role in its own
way, without knowing the model.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The part a parameter plays in a model."""

    EMBEDDING = "embedding"
    """Tables looked up at the input: tokens, positions. A tied head is the same parameter."""
    TABLE = "table"
    """Tables looked up by token further up, such as value embeddings."""
    HEAD = "head"
    """The output matrix, one row for each token."""
    MATRIX = "matrix"
    """Matrices inside blocks, through which every token goes."""
    VECTOR = "vector"
    """Biases, gains, gates and scalars."""
