"""The shapes of a model's parameters, and how many elements of them a process of a mesh holds.

tp divides matrices and vocabularies; dp_shard and cp together divide the rows of everything, and
the first process has the largest part where they do not divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.config.model import GATE_FEATURES, GPTConfig, Role
from gristmill.config.parallel import Mesh
from gristmill.plan.arithmetic import norm_vectors


@dataclass(frozen=True)
class ParameterShape:
    """A parameter, or several equal ones, as far as its size goes."""

    role: Role
    rows: int
    columns: int = 1
    count: int = 1
    split: bool = False
    """Whether tp divides it."""
    in_block: bool = True

    def held(self, mesh: Mesh) -> int:
        """Elements on the process that has most."""
        ways = mesh.dp_shard * mesh.cp if mesh.shards_rows else 1
        tp = mesh.tp if self.split else 1
        rows, columns = self.rows, self.columns
        if self.split and rows % tp == 0:
            rows //= tp
        elif self.split:
            columns = -(-columns // tp)
        return self.count * -(-rows // ways) * columns

    def whole(self, mesh: Mesh) -> int:
        """Elements on a process once rows are gathered."""
        return self.count * self.rows * self.columns // (mesh.tp if self.split else 1)


def parameter_shapes(
    model: GPTConfig, *, rows: int, layers: int, first: bool, last: bool
) -> Iterator[ParameterShape]:
    """The parameters of some layers of a model, with its ends."""
    width, head = model.width, model.head_size
    query, key = model.heads * head, model.groups * head
    gated = 2 if model.activation == "swiglu" else 1
    matrix, vector = Role.MATRIX, Role.VECTOR
    if layers:
        yield ParameterShape(matrix, query + 2 * key, width, layers, split=True)
        yield ParameterShape(matrix, width, query, layers, split=True)
        yield ParameterShape(matrix, gated * model.inner, width, layers, split=True)
        yield ParameterShape(matrix, width, model.inner, layers, split=True)
        yield ParameterShape(vector, norm_vectors(model), 1, 2 * layers)
        if model.bias:
            yield ParameterShape(vector, gated * model.inner, 1, layers, split=True)
            yield ParameterShape(vector, width, 1, 2 * layers)
        if model.has_qkv_bias:
            yield ParameterShape(vector, query + 2 * key, 1, layers, split=True)
        if model.qk_norm and model.norm_gain:
            yield ParameterShape(vector, head, 1, 2 * layers)
        gates = min(GATE_FEATURES, width)
        if model.attention_gate:
            yield ParameterShape(vector, model.heads, gates, layers, split=True)
        tables = len(model.value_layers) * layers // model.layers
        if tables:
            yield ParameterShape(vector, model.groups, gates, tables, split=True)
            yield ParameterShape(Role.TABLE, rows, key, tables, split=True, in_block=False)
    if first or (last and model.tie_head):
        yield ParameterShape(Role.EMBEDDING, rows, width, split=True, in_block=False)
    if first and model.positions == "learned":
        yield ParameterShape(Role.EMBEDDING, model.context, width, in_block=False)
    if first and model.embedding_norm:
        yield ParameterShape(vector, norm_vectors(model), in_block=False)
    if last and not model.tie_head:
        yield ParameterShape(Role.HEAD, rows, width, split=True, in_block=False)
    if last:
        yield ParameterShape(vector, norm_vectors(model), in_block=False)
