"""How long a training step takes, part by part, by formula and a few constants of a kind of GPU.

For n tokens in a micro-batch, `tp` parts of every layer, and stages of layers in a pipeline:

    product     2 n k o / (peak * share) * (1 + r/n) * (1 + f/k) * (1 + f/o)    forward; twice that
                                                                               backward
    attention   4 n T w / 2 operations at the share of flash attention; without it, all of T, and
                the scores go through memory
    elementwise bytes that norms, activations and residuals read and write / memory bandwidth
    kernels     each waits for its start; all of them together for the host that launches them
    collective  bytes / bandwidth of the slowest link on the way + latency * hops
    pipeline    (m - 1) * slowest stage + all stages together; the wait at both ends of it is
                divided by the groups of layers on each device

r, f and the shares are `Rates` of the hardware; where they come from is said there. `m` is the
number of micro-batches. Everything is a function of plain numbers, so that programs other than this
one can be planned too: that is how the constants are compared with published measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gristmill.config.parallel import Mesh
from gristmill.plan.hardware import Hardware


@dataclass(frozen=True)
class Shape:
    """A transformer in numbers."""

    layers: int
    width: int
    heads: int
    groups: int
    """Key and value heads."""
    head_size: int
    inner: int
    rows: int
    """Rows of the embedding, padded."""
    gated: bool = False
    """Whether the feed-forward part has two matrices in, as swiglu."""
    tied: bool = True
    keys: float = 1.0
    """The mean share of earlier positions that a layer attends to: below 1 with windows."""
    trained: float = 1.0
    """The share of the weights of blocks that has gradients: below 1 with adapters."""

    @property
    def features(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_size

    @property
    def block(self) -> int:
        """Weights in the matrix products of a block."""
        attention = self.width * self.head_size * 2 * (self.heads + self.groups)
        return attention + self.width * self.inner * (3 if self.gated else 2)

    @property
    def parameters(self) -> int:
        """All weights, without the few of norms and biases."""
        return self.layers * self.block + self.rows * self.width * (1 if self.tied else 2)


@dataclass(frozen=True)
class Program:
    """What a program does; the defaults are this one's."""

    flash: bool = True
    """Attention without keeping its scores in memory."""
    native: bool = True
    """Kernels of attention that are made for this kind of GPU, where there are such."""
    fused: bool = True
    """Neighbouring elementwise operations are one kernel."""
    sequence_parallel: bool = True
    """tp divides the residual stream as well."""
    parallel_block: bool = False
    """Attention and feed-forward part of a block share their collectives."""
    overlap_tensor: bool = False
    """Collectives of tp run beside the products they belong to."""
    overlap_data: bool = True
    """Gradients are summed while the backward pass goes on."""
    divided_optimizer: bool = False
    """Copies of the model divide the optimizer among them (ZeRO-1)."""
    balanced: bool = False
    """Stages of a pipeline have as many layers as makes them equally slow, with the head."""
    graphs: bool = False
    """The host launches a whole pass at once."""
    bubble: float = 1.0
    """The share of a pipeline's wait that the schedule leaves."""
    gradient_bytes: float = 4
    """Bytes of each gradient on the way."""
    weight_bytes: float = 2
    """Bytes of each weight that is gathered."""
    optimizer_bytes: float = 36.0
    """Bytes that the optimizer reads and writes for each parameter it holds; clipping counts."""
    host_seconds: float = 0.0
    """Seconds for each parameter held of an optimizer that steps on the host."""
    optimizer_flops: float = 0.0
    """Operations in products of the optimizer for each parameter of a block."""
    keeps_fp8_weights: bool = False
    """Weights are cast to fp8 once for all micro-batches of a step."""


@dataclass(frozen=True)
class Work:
    """One step of one layout."""

    shape: Shape
    sequence: int
    batch: int
    micro_batch: int
    mesh: Mesh
    recompute: str = "none"
    """none, selective (norms and activations), attention (as Megatron calls selective), products
    (as torchtitan does: every second of them) or full."""
    stages: int = 1
    """Groups of layers on each device of a pipeline."""
    keep: str = "nothing"
    """What sharding keeps whole within a step: nothing, weights or gradients."""
    precision: str = "bf16"
    """Of products: bf16, fp16, tf32 or fp32."""
    fp8: frozenset[str] = frozenset()
    """Parts of blocks, attention and mlp, whose products are in fp8 instead."""
    program: Program = field(default_factory=Program)
    recompute_share: float = 1.0
    """The share of blocks that recompute."""
    loss_rows: int | None = None
    """Rows of the head in the loss, if not all."""

    @property
    def wide(self) -> float:
        """Bytes of an element of activations over those in 16 bits."""
        return 2.0 if self.precision in ("fp32", "tf32") else 1.0

    @property
    def micro_batches(self) -> int:
        return max(1, self.batch // (self.mesh.data * self.micro_batch))


PARTS = (
    "products",
    "attention",
    "elementwise",
    "head",
    "optimizer",
    "tensor_communication",
    "data_communication",
    "pipeline_communication",
    "bubble",
    "recomputation",
    "launches",
)
"""What a step consists of; the seconds of all parts add up to those of the step."""


@dataclass(frozen=True)
class StepPlan:
    """One step, as planned."""

    parts: dict[str, float]
    """Seconds, by part."""
    seconds: float
    tokens_per_second: float
    """On all devices together."""
    mfu: float
    """Operations that the model needs (PaLM counting) over the devices' peak."""


def time_step(work: Work, hardware: Hardware) -> StepPlan:
    """The step of a layout on a kind of GPU."""
    mesh, shape, program = work.mesh, work.shape, work.program
    tokens = work.micro_batch * work.sequence // mesh.cp
    block = _block(work, hardware, tokens)
    layers, count = shape.layers / mesh.pp, work.micro_batches
    head = _head(work, hardware, tokens)
    if program.balanced:
        head /= mesh.pp
    tensor = layers * _tensor(work, hardware, tokens) + layers * _context(work, hardware, tokens)
    parts = {
        "products": count * layers * block.products,
        "attention": count * layers * block.attention,
        "elementwise": count * layers * block.elementwise,
        "head": count * head,
        "tensor_communication": count * tensor,
        "recomputation": count * layers * block.recomputed,
        "launches": count * layers * block.launches,
    }
    sent = _between_stages(work, hardware, tokens)
    if mesh.pp > 1:
        parts["pipeline_communication"] = count * sent
    body = layers * block.seconds + tensor + sent
    # All other stages wait while the first and the last of the micro-batches go through: the one
    # with the head is the slowest.
    wait = (mesh.pp - 1) * body / work.stages * program.bubble
    parts["bubble"] = wait if mesh.pp > 1 else 0.0
    backward = layers * block.backward + 2 / 3 * head
    forward = body - layers * block.backward + head / 3
    parts["data_communication"] = _data(work, hardware, forward, backward)
    parts["optimizer"] = _optimizer(work, hardware)
    parts = {name: parts.get(name, 0.0) for name in PARTS}
    seconds = sum(parts.values())
    amount = work.batch * work.sequence
    needed = amount * model_flops(shape, work.sequence, rows=work.loss_rows)
    peak = hardware.peak(work.precision) * mesh.processes
    return StepPlan(parts, seconds, amount / seconds, needed / seconds / peak)


def model_flops(shape: Shape, sequence: int, *, rows: int | None = None) -> float:
    """Operations to train on one token, in PaLM's counting; `rows` of the head, if not all."""
    products = (
        2 * shape.layers * shape.block * (2 + shape.trained)
        + 6 * (rows or shape.rows) * shape.width
    )
    return products + 12 * shape.layers * shape.features * sequence * shape.keys


# ------------------------------------------------------------------ one block


@dataclass(frozen=True)
class _Block:
    """Seconds of one block for one micro-batch."""

    products: float
    attention: float
    elementwise: float
    recomputed: float
    launches: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elementwise + self.recomputed + self.launches

    @property
    def backward(self) -> float:
        third = (self.products + self.attention + self.elementwise + self.launches) * 2 / 3
        return third + self.recomputed


def product_seconds(
    rows: float, inner: float, outer: float, *, hardware: Hardware, precision: str
) -> float:
    """One matrix product of rows x inner by inner x outer."""
    rates = hardware.rates
    share = rates.product_share_fp8 if precision == "fp8" else rates.product_share
    peak = hardware.peak(precision) * share
    size = (1 + rates.half_rows / rows) * (1 + rates.half_features / inner)
    return 2 * rows * inner * outer / peak * size * (1 + rates.half_features / outer)


def _block(work: Work, hardware: Hardware, tokens: int) -> _Block:
    shape, program, rates, tp = work.shape, work.program, hardware.rates, work.mesh.tp
    query = shape.features / tp
    both = (shape.features + 2 * shape.groups * shape.head_size) / tp
    inner = shape.inner / tp
    sizes = [
        ("attention", shape.width, both),
        ("attention", query, shape.width),
        ("mlp", shape.width, inner * (2 if shape.gated else 1)),
        ("mlp", inner, shape.width),
    ]
    forward = sum(
        product_seconds(
            tokens, k, o, hardware=hardware, precision="fp8" if part in work.fp8 else work.precision
        )
        for part, k, o in sizes
    )
    weight_casts = 1 / work.micro_batches if program.keeps_fp8_weights else 1.0
    casts = sum(_cast_bytes(tokens, k, o, weight_casts) for part, k, o in sizes if part in work.fp8)
    attention = _attention(work, hardware, tokens)
    moved = work.wide * _elementwise_bytes(work, tokens)
    bandwidth = hardware.memory_bandwidth * rates.memory_share
    elementwise = moved / bandwidth
    again = {
        "none": 0.0,
        "selective": elementwise,
        "attention": 0.0 if program.flash else attention,
        "products": forward / 2 + elementwise,
        "full": forward + attention + elementwise,
    }[work.recompute] * work.recompute_share
    products = forward * (2 + shape.trained)
    # The backward pass of attention has five products to the forward pass's two.
    attention_all = attention * (3.5 if program.flash else 3.0)
    all_elementwise = 3 * elementwise + casts / bandwidth
    busy = products + attention_all + all_elementwise + again
    kernels = rates.kernels_fused if program.fused else rates.kernels
    passes = 3.0 + (work.recompute_share if work.recompute == "full" else 0.0)
    gaps = passes * kernels * rates.gap
    host = 0.0 if program.graphs else passes * kernels * rates.launch
    launches = _smooth_maximum(busy + gaps, host) - busy
    return _Block(products, attention_all, all_elementwise, again, launches)


def _cast_bytes(rows: float, inner: float, outer: float, weight_casts: float) -> float:
    """What casts of a layer in fp8 read and write: input and gradient in 16 bits, the weight in 32,
    each in fp8 twice. `weight_casts`: how often the weight is cast for each micro-batch."""
    return rows * (inner + outer) * (2 + 2) + weight_casts * inner * outer * (4 + 2)


def _smooth_maximum(one: float, other: float) -> float:
    """The longer of two that overlap, a little more where they are about equal."""
    return float((one**4 + other**4) ** 0.25)


def _attention(work: Work, hardware: Hardware, tokens: int) -> float:
    """The forward pass of attention, without its linear layers."""
    shape, program, rates, tp = work.shape, work.program, hardware.rates, work.mesh.tp
    peak = hardware.peak(work.precision)
    flops = 4 * tokens * work.sequence * shape.features / tp
    if program.flash:
        share = rates.attention_share_native if program.native else rates.attention_share
        peak *= share
        # A head below 128 features leaves part of the units idle.
        narrow = 1 + rates.half_head / shape.head_size
        return flops / 2 * shape.keys / peak * narrow
    peak *= rates.product_share
    narrow = 1 + rates.half_features / shape.head_size
    # Written by the product, read and written by softmax and by dropout, read by the product.
    moved = 11.0 * tokens * work.sequence * shape.heads / tp
    memory = hardware.memory_bandwidth * rates.memory_share
    return flops / peak * narrow + moved / memory


def _elementwise_bytes(work: Work, tokens: int) -> float:
    """What one block's forward pass reads and writes beside products and attention, in 16 bits."""
    shape, program, tp = work.shape, work.program, work.mesh.tp
    stream = 18.0 if not program.fused else 14.0  # two norms, two residual additions, dropout
    inside = 8.0 if not program.fused else 4.0  # biases, rotary positions, copies of heads
    activation = (5.0 if not program.fused else 4.0) * (1.5 if shape.gated else 1.0)
    whole = tp if program.sequence_parallel else 1
    features = (shape.features + 2 * shape.groups * shape.head_size) / 3
    each = stream * shape.width / whole
    return tokens * (each + (inside * features + activation * shape.inner) / tp)


# ------------------------------------------------------------------ the rest of a step


def _head(work: Work, hardware: Hardware, tokens: int) -> float:
    """The head with its loss, and the embedding, forward and backward."""
    shape, tp = work.shape, work.mesh.tp
    rows = (work.loss_rows or shape.rows) / tp
    product = product_seconds(
        tokens, shape.width, rows, hardware=hardware, precision=work.precision
    )
    each = 10.0 if work.program.fused else 22.0  # logits in 16 bits, and copies in 32
    moved = tokens * work.wide * (each * rows + 24.0 * shape.width)
    return 3 * product + moved / (hardware.memory_bandwidth * hardware.rates.memory_share)


def _tensor(work: Work, hardware: Hardware, tokens: int) -> float:
    """What one block waits for the collectives of tp."""
    mesh, program, rates = work.mesh, work.program, hardware.rates
    if mesh.tp == 1:
        return 0.0
    passes = 2.0 + (work.recompute_share if work.recompute == "full" else 0.0)
    times = passes * (1.0 if program.parallel_block else 2.0)
    size = 2.0 * work.wide * tokens * work.shape.width
    one = all_reduce(size, group=mesh.tp, stride=1, hardware=hardware)
    exposed = rates.exposed_tensor if program.overlap_tensor else 1.0
    return times * one * exposed


def _context(work: Work, hardware: Hardware, tokens: int) -> float:
    """What one block waits for the keys and values of other parts of its sequences."""
    mesh = work.mesh
    if mesh.cp == 1:
        return 0.0
    shape = work.shape
    size = 4.0 * work.wide * tokens * shape.groups * shape.head_size / mesh.tp * (mesh.cp - 1)
    bandwidth, latency = hardware.path(group=mesh.cp, stride=mesh.tp)
    passes = 4.0 if work.recompute == "full" else 3.0
    # It goes round while attention works on what came before; about half is hidden.
    return 0.5 * passes * size / bandwidth + passes * latency * (mesh.cp - 1)


def _between_stages(work: Work, hardware: Hardware, tokens: int) -> float:
    """What a stage waits in each micro-batch to send and to receive."""
    mesh = work.mesh
    if mesh.pp == 1:
        return 0.0
    # What tp holds whole is sent in parts, and put together inside the node.
    size = 2.0 * work.wide * tokens * work.shape.width / mesh.tp
    stride = mesh.processes // mesh.pp
    bandwidth, latency = hardware.path(group=2, stride=stride)
    return 2 * work.stages * (size / bandwidth + latency)


def held_parameters(work: Work) -> float:
    """Parameters of the stage that holds most, before data parallelism divides them."""
    shape, mesh = work.shape, work.mesh
    table = shape.rows * shape.width
    blocks = shape.layers * shape.block / mesh.pp
    return (blocks + table * (1 if shape.tied or mesh.pp > 1 else 2)) / mesh.tp


def _data(work: Work, hardware: Hardware, forward: float, backward: float) -> float:
    """What a step waits to sum gradients and to gather weights, beyond what is hidden behind the
    forward and backward passes; those are of one micro-batch."""
    mesh, program = work.mesh, work.program
    sharded, copies = mesh.dp_shard * mesh.cp, mesh.dp_replicate
    if mesh.dp_shard == 1:
        sharded, copies = 1, mesh.dp_replicate * mesh.cp
    if not program.overlap_data:
        forward = backward = 0.0
    wait = 0.0
    if sharded > 1:
        wait += _over_shards(work, hardware, sharded, forward, backward)
    if copies > 1:
        wait += _over_copies(work, hardware, sharded, copies, backward)
    return wait


def _over_shards(
    work: Work, hardware: Hardware, group: int, forward: float, backward: float
) -> float:
    """The waits for weights that are gathered and gradients that are scattered, block by block."""
    mesh, program, share = work.mesh, work.program, hardware.rates.hidden_data
    held, blocks = held_parameters(work), work.shape.layers / mesh.pp

    def seconds(size: float) -> float:
        return half_reduce(size, group=group, stride=mesh.tp, hardware=hardware, pieces=blocks)

    gather = seconds(program.weight_bytes * held)
    scatter = seconds(program.gradient_bytes * held * work.shape.trained)
    if work.keep == "gradients" or mesh.pp > 1:
        return _exposed(gather + scatter, (forward + backward) * share)
    if work.keep == "weights":
        once = _exposed(gather, forward * share)
        return once + work.micro_batches * _exposed(scatter, backward * share)
    return work.micro_batches * _exposed(2 * gather + scatter, (forward + backward) * share)


def _over_copies(
    work: Work, hardware: Hardware, sharded: int, group: int, backward: float
) -> float:
    """The wait for gradients that copies of the model sum, behind the last backward pass."""
    program = work.program
    size = program.gradient_bytes * held_parameters(work) * work.shape.trained / sharded
    stride = work.mesh.tp * sharded
    seconds = all_reduce(size, group=group, stride=stride, hardware=hardware)
    if program.divided_optimizer:
        # Gradients are scattered, weights gathered.
        seconds *= (program.gradient_bytes + program.weight_bytes) / (2 * program.gradient_bytes)
    # What shards send has the network first.
    share = hardware.rates.hidden_data * (0.5 if sharded > 1 else 1.0)
    return _exposed(seconds, backward * share)


def _exposed(seconds: float, hidden: float) -> float:
    """What is left of a transfer that runs beside other work; its end is always waited for."""
    return max(0.05 * seconds, seconds - hidden)


def _optimizer(work: Work, hardware: Hardware) -> float:
    mesh, program = work.mesh, work.program
    over = mesh.dp_shard * mesh.cp if mesh.dp_shard > 1 else 1
    if program.divided_optimizer and mesh.dp_shard == 1:
        over = mesh.dp_replicate * mesh.cp
    held = held_parameters(work) * work.shape.trained / over
    memory = hardware.memory_bandwidth * hardware.rates.memory_share
    products = (
        program.optimizer_flops * held / (hardware.peak("bf16") * hardware.rates.product_share)
    )
    step = program.host_seconds * held or held * program.optimizer_bytes / memory
    return step + products + hardware.rates.step


# ------------------------------------------------------------------ collectives


def all_reduce(size: float, *, group: int, stride: int, hardware: Hardware) -> float:
    """Sum `size` bytes over a group whose members are `stride` ranks apart."""
    return 2 * half_reduce(size, group=group, stride=stride, hardware=hardware)


def half_reduce(
    size: float, *, group: int, stride: int, hardware: Hardware, pieces: float = 1
) -> float:
    """Half of it: scatter the sums, or gather what is scattered; in so many collectives."""
    if group == 1:
        return 0.0
    bandwidth, latency = hardware.path(group=group, stride=stride)
    inside = max(1, min(group, hardware.per_node // stride))
    # A tree inside a node, a ring of nodes.
    hops = math.log2(inside) + math.ceil(group / inside) - 1
    return (group - 1) / group * size / bandwidth + pieces * latency * hops
