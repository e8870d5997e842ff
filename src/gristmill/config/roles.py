"""What models tell the rest of the program: roles of parameters, and abilities.

An optimizer treats each role in its own way without knowing the model. A feature that needs an
ability refuses a model without it.
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


class Ability(StrEnum):
    """Something that not every model can do. The value completes "this setting needs ..."."""

    TENSOR = "tensor parallelism"
    CONTEXT = "context parallelism"
    PIPELINE = "pipeline stages"
    DOCUMENTS = "attention masks for packed documents"
    FP8_HEAD = "an output head in fp8"
    SAMPLED_SOFTMAX = "a sampled softmax"
    MTP = "a loss of the token after the next"
