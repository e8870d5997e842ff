"""The memory of one process in training, by kind and over a step, before anything is spent.

A step has four moments at which its memory may be largest:

    loss       weights, state, activations of all micro-batches in flight, logits of a slice
    backward   the same without logits, with the head's gradient and the work of one block
    gradients  all gradients, with the activations of the first block
    update     all gradients, and what the optimizer computes

With N parameters on this device, N' of them in the matrices of blocks, b bytes of the format of
activations, tokens n of a micro-batch, V rows and C columns of the head, a slice of m tokens in the
loss and f micro-batches in flight,

    weights        4 N                    frozen ones in b bytes
    gradients      4 N
    optimizer      as its settings say    and copies of the weights that workers exchange
    activations    f n layers (bytes of a block, see activations.py) + b N' for weights that were
                   cast for matrix products
    logits         b V m + b V C + 4 V C + 2 b n C: a slice, the head as it is multiplied, its
                   gradient, hidden states and their gradient
    communication  buffers of collectives
    workspace      what a block's backward pass or the optimizer needs besides
    fragmentation  what the allocator holds and cannot use, and what CUDA holds itself

The largest moment is the plan: its parts are the bytes at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.config.model import Role
from gristmill.config.optim import MuonConfig, SoapConfig
from gristmill.config.parallel import Mesh
from gristmill.config.resolve import with_formats
from gristmill.config.schema import RunConfig
from gristmill.plan.activations import Mode, block_bytes
from gristmill.plan.process import BYTES, Parts, PlannedProcess

KINDS = (
    *("weights", "gradients", "optimizer", "activations", "logits", "communication"),
    *("workspace", "fragmentation"),
)

SLICE_BYTES, CPU_SLICE_BYTES = 2**31, 16 * 2**20
"""Memory allowed for the logits of a slice of tokens, on a GPU and on the CPU."""
SLICE_TOKENS, CPU_SLICE_TOKENS = 64, 256
HEAD_ROWS = 64
"""The gradient of the head has room for so many rows of padding."""
BUCKET = 2**23
"""Elements of gradients per collective of replicas."""
MATRIX_PIECE, ACCUMULATED_PIECE = 2**27, 2**24
"""Elements that Muon, and AccumAdamW, update at once."""
FRAGMENTED = 0.03
"""The part of what comes and goes in a step that the allocator holds and cannot use."""
CONTEXT = 500 * 2**20
"""Bytes that CUDA holds in a process outside of the allocator: context, kernels and workspaces."""
COLLECTIVES = 300 * 2**20
"""Bytes that NCCL holds for the buffers of its groups."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a process at the moment of a step at which it is largest."""

    parts: dict[str, int]
    """Bytes by kind, in the order of KINDS."""
    timeline: tuple[tuple[str, int], ...]
    """Bytes at each moment of a step."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """What the device's allocator will say at its peak: all but fragmentation."""
        return self.total - self.parts["fragmentation"]

    @property
    def moment(self) -> str:
        """When it is largest."""
        return max(self.timeline, key=lambda one: one[1])[0]


def plan_memory(
    config: RunConfig,
    mesh: Mesh,
    *,
    vocab: int,
    micro_batch: int,
    recompute: str,
    stage: int = 0,
    device: str | None = None,
) -> MemoryPlan:
    """The memory of a process in a pipeline stage, with this micro-batch and recomputation in place
    of those of the settings. `device`: its kind, if not as the settings say; "auto" is a GPU."""
    asked = config.runtime.device
    kind = device or ("cuda" if asked == "auto" else asked)
    on_gpu = kind not in ("cpu", "mps")
    config = with_formats(config, has_bf16=on_gpu, on_gpu=on_gpu)
    step = _Step(
        config,
        mesh,
        vocab=vocab,
        micro_batch=micro_batch,
        mode=recompute,
        stage=stage,
        on_gpu=on_gpu,
    )
    moments = dict(step.moments())
    timeline = [("between steps", step.base()), *moments.items()]
    largest = max(moments.values(), key=lambda parts: sum(parts.values()))
    parts = {kind: int(largest.get(kind, 0)) for kind in KINDS}
    parts["fragmentation"] = step.fragmentation(parts)
    return MemoryPlan(parts, tuple((name, int(sum(one.values()))) for name, one in timeline))


class _Step(PlannedProcess):
    """One step of one process: what comes and goes, beside what stays."""

    def moments(self) -> Iterator[tuple[str, Parts]]:
        """Bytes by kind at each moment."""
        base, gradients, collected = self.base(), self.gradient_bytes, self.collected
        before = gradients if self.accumulate > 1 else 0.0
        kept = self.activations() + self.casts()
        stages, (forward, backward) = self.stage_buffers(), self.gathered()
        passing = {**base, "activations": kept, "gradients": before}
        # The forward pass of the first micro-batch collects what goes into layers only.
        passing["optimizer"] += collected * (1.0 if self.accumulate > 1 else 0.5)
        if self.last:
            loss = {"logits": self.logits(), "communication": stages + forward}
            yield "loss", {**passing, **loss}
            # The ends of the model are gathered anew, and copied from the buffer of the collective.
            again = self.ends_gathered if self.config.parallel.keep in (None, "nothing") else 0.0
            gather = {"logits": self.head_gradients() / 2, "communication": stages + 2 * again}
            yield "gather", {**passing, **gather}
            head = {"logits": self.head_gradients(), "communication": stages + forward}
            yield "head", {**passing, **head}
        work, buffers = self.backward_work(), stages + self.exchange()
        if self.mesh.shards_rows:
            # Whole gradients of a block take the place of what was kept for them.
            work = max(work, self.computing.itemsize * self._one_block())
        start = {"logits": self.waiting_head(), "workspace": work}
        yield "backward", {**passing, **start, "communication": backward + buffers}
        one = self.activations() / max(1, self.layers) / self.in_flight
        base["optimizer"] += collected
        passing = {**base, "gradients": gradients, "logits": self.waiting_head()}
        end = {"activations": one, "communication": backward + buffers, "workspace": work}
        yield "gradients", {**passing, **end, "logits": self.waiting_head() + self.waiting_tables()}
        ends = {"communication": self.last_gathered() + buffers}
        ends["workspace"] = self.waiting_tables() + self.embedding_gradient()
        yield "embedding", {**passing, **ends}
        last = {"workspace": self.update_work(), "communication": self.rounded_gradients()}
        yield "update", {**base, "gradients": gradients, **last}

    def blocks(self) -> list[tuple[int, Mode]]:
        """How many blocks here recompute in which mode."""
        every = self.config.train.recompute_every or 1
        if self.mode == "none":
            return [(self.layers, "none")]
        some = -(-self.layers // every)
        return [(some, self.mode), (self.layers - some, "none")]  # type: ignore[list-item]

    def activations(self) -> float:
        """Bytes kept from the forward pass to the backward pass."""
        scores = self.scores()
        kept = sum(
            count * block_bytes(self.model, self.computing, mode=mode, scores=scores).kept
            for count, mode in self.blocks()
        )
        ends = 32.0  # tokens, targets and positions
        if self.last:
            ends += self.computing.itemsize * self.model.width / self.computing.stream
        if self.first and self.model.dropout:
            ends += self.model.width / self.computing.stream
        if self.model.positions == "rotary":
            ends += 0.0
        return self.tokens * self.in_flight * (kept + ends)

    def scores(self) -> float:
        """Bytes of masks of attention for each token, in the mean over blocks."""
        if self.model.short_window is None or self.mesh.cp > 1:
            return 0.0
        # Every other block makes a mask of its own, shared by all samples.
        sequence = self.config.data.sequence or self.config.model.context
        return 0.5 * self.computing.itemsize * sequence / self.micro_batch

    def casts(self) -> float:
        """Bytes of weights that were cast for matrix products and are kept for the backward
        pass."""
        gathered = self.mesh.shards_rows
        if self.computing.itemsize == 4 or gathered or self.model.lora is not None:
            return 0.0
        kept = sum(count for count, mode in self.blocks() if mode == "none")
        sizes = {name: one.inputs * one.outputs for name, one in self.model.linears().items()}
        in_fp8 = sum(sizes[name] for name in sizes if name.split(".")[2] in self.computing.fp8)
        each = self.computing.itemsize + (1 - self.computing.itemsize) * in_fp8 / sum(
            sizes.values()
        )
        return each * self.matrices * kept / self.layers

    def _one_block(self) -> float:
        """Elements of the largest block, gathered."""
        inside = sum(s.whole(self.mesh) for s in self.shapes if s.in_block)
        return inside / max(1, self.layers)

    def backward_work(self) -> float:
        """What the backward pass of a block needs besides what was kept."""
        scores = self.scores()
        work = max(
            self.tokens * (one.working + one.recomputed)
            for one in (
                block_bytes(self.model, self.computing, mode=mode, scores=scores)
                for count, mode in self.blocks()
                if count
            )
        )
        recomputes = self.mode != "none" and not self.mesh.shards_rows
        casts = self.computing.itemsize * self._one_block() if recomputes else 0.0
        return work + (casts if self.computing.itemsize < 4 else 0.0)

    # -------------------------------------------------------------- the loss

    @property
    def head_elements(self) -> float:
        return self.rows / self.mesh.tp * self.model.width

    @property
    def trains_head(self) -> bool:
        return self.model.lora is None

    def slice_tokens(self, rows: float, *, width: int) -> float:
        """Tokens of a slice of the loss."""
        allowance = SLICE_BYTES if self.on_gpu else CPU_SLICE_BYTES
        least = SLICE_TOKENS if self.on_gpu else CPU_SLICE_TOKENS
        return min(self.tokens, max(least, allowance // (width * rows) // 64 * 64))

    def logits(self) -> float:
        """Bytes of the loss at its busiest: a slice of logits, the head as it is multiplied, its
        gradient, hidden states and theirs."""
        b, rows = self.computing.itemsize, self.rows / self.mesh.tp
        sampled = self.config.train.sampled_softmax
        if sampled is not None and sampled < rows and self.mesh.tp == 1:
            rows = float(sampled)
        fp8 = bool(self.config.precision.fp8)
        kernel = self.config.runtime.kernels and self.on_gpu and self.mesh.tp == 1
        width = b if kernel or fp8 else 4
        count = self.slice_tokens(rows, width=width)
        # The kernel overwrites logits; plain operations compute in fp32, and keep the rounded ones.
        each = float(b) if kernel else (4.0 if b == 4 else 4.0 + 2 * b)
        if fp8:
            each += 1
        if self.model.logit_cap is not None and not kernel:
            each = 12.0 + (b if b < 4 else 0)  # the cap's slope, and squares
        head = 0.0 if b == 4 else b * rows * self.model.width
        if fp8:
            head = 2 * rows * self.model.width
        if rows != self.rows / self.mesh.tp:
            head += 4 * rows * self.model.width
        gradient = 4 * (self.rows / self.mesh.tp + HEAD_ROWS) * self.model.width
        gradient = gradient if self.trains_head else 0.0
        hidden = 2 * b * self.tokens * self.model.width
        return count * rows * each + head + gradient + hidden

    def head_gradients(self) -> float:
        """Bytes when the backward pass begins: the gradients that the loss has computed, and the
        same times the outer gradient."""
        hidden = self.computing.itemsize * self.tokens * self.model.width
        head = 4 * self.head_elements if self.trains_head else 0.0
        return 2 * (hidden + head)

    def waiting_head(self) -> float:
        """Bytes of the head's gradient while blocks have their backward pass. It waits for that of
        the embedding if both are one parameter, and is whole if weights are sharded."""
        if not self.trains_head or not self.last:
            return 0.0
        waits = self.model.tie_head and self.accumulate > 1
        gone = not (waits or self.accumulate == 1 or self.mesh.shards_rows)
        return 0.0 if gone else 4 * self.head_elements

    def waiting_tables(self) -> float:
        """Bytes of the gradients of value embeddings, which are whole if weights are sharded."""
        if not self.mesh.shards_rows:
            return 0.0
        return sum(4.0 * s.whole(self.mesh) for s in self.shapes if s.role is Role.TABLE)

    def embedding_gradient(self) -> float:
        """Bytes of the embedding's gradient and, if the head is the same parameter, of the sum."""
        if not self.trains_head or not self.first:
            return 0.0
        tied = self.model.tie_head and self.last
        counted = self.accumulate == 1 and not self.mesh.shards_rows
        return 4 * self.head_elements * ((2 if tied else 1) - counted)

    # -------------------------------------------------------------- processes and optimizers

    def stage_buffers(self) -> float:
        """Bytes of what stages of a pipeline send: the stream and its gradients, for every
        micro-batch of a step."""
        if self.mesh.pp == 1:
            return 0.0
        width = self.model.width / self.computing.stream
        ends = (not self.first) + (not self.last)
        each = self.computing.itemsize * self.tokens * width * self.config.parallel.stages_each
        return self.accumulate * each * ends

    def exchange(self) -> float:
        """Bytes of buffers in the backward pass: gradients that replicas sum, and keys and values
        that go round."""
        mesh, found = self.mesh, 0.0
        if self._replicas:
            largest = max(shape.whole(mesh) // shape.count for shape in self.shapes)
            found += 4 * max(BUCKET, largest) + self.rounded_gradients()
        if mesh.cp > 1:
            keys = self.model.groups * self.model.head_size / mesh.tp
            found += 4 * self.computing.itemsize * self.tokens * keys
        return found

    @property
    def _replicas(self) -> bool:
        """Whether processes sum whole gradients."""
        mesh = self.mesh
        several = mesh.dp_replicate * mesh.cp > 1 and not mesh.shards_rows
        return several and not self.config.parallel.decentralized

    def rounded_gradients(self) -> float:
        """Bytes of gradients in the format in which replicas sum them, if it is not fp32."""
        half = BYTES[self.config.precision.reduce or "fp32"] == 2
        return 2.0 * self.trained if half and self._replicas else 0.0

    def gathered(self) -> tuple[float, float]:
        """Bytes of gathered weights, in the forward pass, and in the backward pass with a block's
        gradients before and after they are summed."""
        mesh, b = self.mesh, self.computing.itemsize
        if not mesh.shards_rows:
            return 0.0, 0.0
        block = self._one_block()
        keep = self.config.parallel.keep or ("gradients" if mesh.pp > 1 else "nothing")
        weights = self.ends_gathered + b * block * (1 if keep == "nothing" else self.layers)
        gradients = 4 * block * self.layers if keep == "gradients" else 0.0
        # A block that is gathered ahead, and what is sent of another.
        return weights + gradients * (self.accumulate > 1), weights + gradients + (b + 4) * block

    @property
    def ends_gathered(self) -> float:
        """Bytes of gathered embeddings, tables and head, which stay in fp32."""
        if not self.mesh.shards_rows:
            return 0.0
        return sum(4.0 * s.whole(self.mesh) for s in self.shapes if not s.in_block)

    def last_gathered(self) -> float:
        """Bytes of what is gathered when the backward pass ends, with a block that is sent."""
        sent = 4 * self._one_block() if self.mesh.shards_rows else 0.0
        return self.ends_gathered + sent

    def update_work(self) -> float:
        """Bytes that the optimizer needs while it steps."""
        optim, matrices = self.config.optim, self.matrices
        if self.model.lora is not None or self.config.runtime.offload is not None:
            return 0.0
        soap = isinstance(optim.preconditioning, SoapConfig)
        if isinstance(optim, MuonConfig) or soap:
            # Gradients, momenta, directions and products of as many matrices as fit, or, where
            # nothing is compiled, of equal ones.
            if self.computing.compiled and self.mesh.processes == self.mesh.pp and not soap:
                return 14.0 * min(MATRIX_PIECE, matrices)
            equal = [s for s in self.shapes if s.role is Role.MATRIX]
            most = max(s.whole(self.mesh) for s in equal)
            ways = self.mesh.processes // self.mesh.pp
            one = max(s.whole(self.mesh) / s.count for s in equal)
            whole = one if ways > 1 else 0.0
            each = 62.0 if soap else 24.0
            return each * min(MATRIX_PIECE, most / ways) + 8.0 * whole
        if optim.type in ("accum-adamw", "accum-adam"):
            largest = max(shape.whole(self.mesh) / shape.count for shape in self.shapes)
            return 8.0 * max(ACCUMULATED_PIECE, largest)
        return 0.0

    def fragmentation(self, parts: dict[str, int]) -> int:
        """Bytes that the allocator cannot use and that CUDA holds itself."""
        if not self.on_gpu:
            return 0
        moving = ("gradients", "activations", "logits", "communication", "workspace")
        outside = CONTEXT + (COLLECTIVES if self.mesh.processes > 1 else 0)
        return int(FRAGMENTED * sum(parts[kind] for kind in moving)) + outside
