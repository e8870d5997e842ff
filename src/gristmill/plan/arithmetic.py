"""Parameters and FLOPs of a model, by formula, and the peak speed of known devices.

With L layers, C features of all heads (the width, as a rule), T sequence length and N weights in
matrix products (including the head, so a tied embedding counts once; excluding position and other
embeddings), one training token costs

    PaLM counting     6 N + 12 L C T     as if every token attended to the whole window
    causal counting   6 N +  6 L C T     only the causal half; in layers with a window W instead of
                                         T / 2 the mean number of keys, W - W W / 2 T

Frozen weights, beside which adapters are trained, cost 4 instead of 6: their gradient is not
computed. Recomputation and the optimizer are never counted. Both countings are reported because
other programs use one or the other, and at 124M they differ by 7 %.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources

from gristmill.config.lora import LinearShape
from gristmill.config.model import GATE_FEATURES, GPTConfig, Role
from gristmill.config.parallel import ParallelConfig
from gristmill.config.schema import RunConfig
from gristmill.plan.preconditioner import preconditioner_bytes


@dataclass(frozen=True)
class TokenCost:
    """FLOPs to train on one token, in both countings."""

    palm: float
    causal: float


@dataclass(frozen=True)
class ModelSize:
    """What a whole model weighs, in bytes; trained weights and their gradients are fp32."""

    parameters: int
    state: int
    """Bytes of optimizer state."""
    copies: int = 0
    """Copies of the weights that a worker keeps for its exchanges with others."""
    workers: int = 1
    """How many have weights of their own, if there are such copies."""
    frozen: int = 0
    """Parameters, of all, that are not trained: without gradients and state, and not saved."""
    frozen_bytes: int = 4
    """Bytes of each of them."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.parameters - self.frozen

    @property
    def saved(self) -> int:
        """Bytes of the weights in a checkpoint."""
        return 4 * self.trained

    @property
    def weights(self) -> int:
        return self.saved + self.frozen_bytes * self.frozen

    @property
    def checkpoint(self) -> int:
        """Weights and optimizer state; with exchanges the average, and all that workers keep. Their
        own weights take the place of those that they sent."""
        own = self.copies * self.saved + self.state
        return self.saved + self.workers * own

    @property
    def on_device(self) -> int:
        """Weights, gradients and what exchanges keep."""
        return self.weights + (1 + self.copies) * self.saved

    @property
    def training(self) -> int:
        """All that and optimizer state: the least that training holds in memory."""
        return self.on_device + self.state


def exchange_copies(parallel: ParallelConfig) -> int:
    """Copies of the weights that a worker keeps for its exchanges: what it sent, the result, the
    anchor, the outer momentum, and what rounding has lost."""
    if not parallel.decentralized:
        return 0
    local, exchange = parallel.local, parallel.exchange
    rounds = exchange is not None and exchange.send != "fp32"
    residual = rounds and parallel.topology == "complete"
    nesterov = local is not None and local.outer == "nesterov"
    momentum = nesterov and local is not None and local.outer_momentum != 0
    anchor = residual or momentum or (local is not None and local.outer_lr != 1)
    return 2 + anchor + momentum + residual


def block_matrices(model: GPTConfig) -> int:
    """Weights in the matrix products of one block."""
    attention = model.width * model.head_size * (2 * model.heads + 2 * model.groups)
    mlp = model.width * model.inner * (3 if model.activation == "swiglu" else 2)
    return attention + mlp


def block_vectors(model: GPTConfig) -> int:
    """Biases, norm gains and the gate of attention of one block, without the gates of value
    embeddings."""
    width, head = model.width, model.head_size
    gains = 2 * norm_vectors(model) + (2 * head if model.qk_norm and model.norm_gain else 0)
    qkv = head * (model.heads + 2 * model.groups) if model.has_qkv_bias else 0
    up = model.inner * (2 if model.activation == "swiglu" else 1)
    gate = min(GATE_FEATURES, width) * model.heads if model.attention_gate else 0
    return gains + qkv + gate + (width + up + width if model.bias else 0)


def norm_vectors(model: GPTConfig) -> int:
    """Gains and biases of one norm of the residual stream."""
    if not model.norm_gain:
        return 0
    return model.width * (2 if model.bias and model.norm == "layernorm" else 1)


def value_tables(model: GPTConfig, *, rows: int) -> int:
    """Value embeddings and their gates."""
    gates = min(GATE_FEATURES, model.width) * model.groups
    return len(model.value_layers) * (rows * model.groups * model.head_size + gates)


def count_parameters(model: GPTConfig, *, rows: int) -> int:
    """All parameters of a model whose embedding has `rows` rows; tied ones count once."""
    embedding = rows * model.width * (1 if model.tie_head else 2)
    positions = model.context * model.width if model.positions == "learned" else 0
    norms = norm_vectors(model) * (2 if model.embedding_norm else 1)
    blocks = model.layers * (block_matrices(model) + block_vectors(model))
    return embedding + positions + norms + value_tables(model, rows=rows) + blocks


def count_multiplied(model: GPTConfig, *, rows: int) -> int:
    """Weights in matrix products: the matrices of all blocks and the head, but not embeddings and
    tables, of which a token reads one row."""
    return model.layers * block_matrices(model) + rows * model.width


def count_adapters(model: GPTConfig) -> int:
    """Parameters of all adapters."""
    lora = model.lora
    if lora is None:
        return 0
    chosen = (shape for name, shape in model.linears().items() if lora.chosen(name))
    return sum(lora.rank * (shape.inputs + shape.outputs) for shape in chosen)


def gpt_size(config: RunConfig, *, rows: int, workers: int = 1) -> ModelSize:
    """What a GPT weighs with the optimizer of its run, and with the exchanges of its workers."""
    assert isinstance(config.model, GPTConfig)
    size = count_parameters(config.model, rows=rows)
    if config.model.lora is not None:
        by_role = {Role.MATRIX: count_adapters(config.model)}
        return replace(
            model_size(config, by_role, linears={}, frozen=size),
            # Our own layers would cast them at each use.
            frozen_bytes=4 if config.precision.compute == "fp32" else 2,
        )
    matrices = config.model.layers * block_matrices(config.model)
    by_role = {Role.MATRIX: matrices, Role.EMBEDDING: size - matrices}
    # By name, layer by layer: only for those who need it, since a model may have absurdly many.
    linears = {} if config.optim.preconditioning is None else config.model.linears()
    return model_size(config, by_role, linears=linears, workers=workers)


def model_size(
    config: RunConfig,
    by_role: Mapping[Role, int],
    *,
    linears: Mapping[str, LinearShape],
    frozen: int = 0,
    workers: int = 1,
) -> ModelSize:
    """The same for any model, from the number of trained parameters of each role and of those that
    are frozen, and its linear layers."""
    state = sum(config.optim.state_bytes(role) * count for role, count in by_role.items())
    state += preconditioner_bytes(config.optim, linears)
    copies = exchange_copies(config.parallel)
    return ModelSize(
        frozen + sum(by_role.values()), state, copies, workers if copies else 1, frozen
    )


def token_cost(model: GPTConfig, *, rows: int, sequence: int) -> TokenCost:
    """Cost of training on one token at a sequence length."""
    weights = count_multiplied(model, rows=rows)
    short = min(model.short_window or sequence, sequence)
    layers = {sequence: model.layers - model.layers // 2}
    layers[short] = layers.get(short, 0) + model.layers // 2
    features = model.heads * model.head_size
    palm = sum(count * window for window, count in layers.items())
    causal = sum(count * (window - window**2 / (2 * sequence)) for window, count in layers.items())
    products = 6 * weights
    if model.lora is not None:
        products = 4 * weights + 6 * count_adapters(model)
    return TokenCost(palm=products + 12 * features * palm, causal=products + 12 * features * causal)


def peak_flops(device_name: str, number_format: str = "bf16") -> float | None:
    """Peak dense FLOP/s of a device in a number format (bf16, fp16, tf32 or fp32); None if the
    device is not in the table."""
    table = tomllib.loads((resources.files("gristmill.plan") / "hardware.toml").read_text())
    name = device_name.lower()
    for row in table["device"]:
        if re.search(rf"\b{re.escape(row['match'])}\b", name):
            column = "bf16" if number_format == "fp16" else number_format
            return float(row[f"{column}_tflops"]) * 1e12
    return None
