"""One process of a planned run: its layers and its tokens, and what it holds between two steps.

    layers     those of its pipeline stage
    held       parameters: N of the module `memory`, divided by tp and by sharding
    tokens     of a micro-batch, divided by the context
    in flight  micro-batches whose activations are there at once, by the schedule of the pipeline
    base       bytes of weights, optimizer state, and copies that workers exchange

What a step needs beside it is in `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from gristmill.base.errors import Problem
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import KfacConfig, OptimizerConfig, SoapConfig
from gristmill.config.parallel import SEVERAL, Mesh
from gristmill.config.resolve import padded, portions
from gristmill.config.schema import RunConfig
from gristmill.plan.activations import Computing
from gristmill.plan.arithmetic import exchange_copies
from gristmill.plan.parameters import ParameterShape, parameter_shapes
from gristmill.plan.preconditioner import kfac_cost, preconditioner_bytes
from gristmill.plan.shape import planned_model

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element, by format."""
Parts = dict[str, float]
"""Bytes by kind of memory (see `KINDS` in `memory.py`)."""


@dataclass(frozen=True)
class PlannedProcess:
    """One process of a pipeline stage, with a micro-batch of this size."""

    config: RunConfig
    mesh: Mesh
    vocab: int
    micro_batch: int
    mode: str
    stage: int
    on_gpu: bool = True

    # -------------------------------------------------------------- what there is

    @cached_property
    def model(self) -> GPTConfig:
        return planned_model(self.config.model)

    @cached_property
    def computing(self) -> Computing:
        config, mesh = self.config, self.mesh
        sequence = config.parallel.sequence in (None, True)
        return Computing(
            itemsize=BYTES[config.precision.compute],
            compiled=config.runtime.compiles("cuda" if self.on_gpu else "cpu"),
            # K-FAC reads the inputs of layers, which the kernels never write.
            kernels=config.runtime.kernels and self._kfac is None,
            on_gpu=self.on_gpu,
            tp=mesh.tp,
            divides_stream=sequence and mesh.tp > 1,
            cp=mesh.cp,
            fp8=frozenset(config.precision.fp8_of_blocks),
        )

    @cached_property
    def layers(self) -> int:
        """Layers on this process."""
        return -(-self.model.layers // self.mesh.pp)

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.mesh.pp - 1

    @cached_property
    def rows(self) -> int:
        """Rows of the embedding in the whole model."""
        return padded(self.config.model.vocab or self.vocab, self.config.model, ranks=self.mesh.tp)

    @cached_property
    def shapes(self) -> list[ParameterShape]:
        return list(
            parameter_shapes(
                self.model, rows=self.rows, layers=self.layers, first=self.first, last=self.last
            )
        )

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch on this process."""
        sequence = self.config.data.sequence or self.config.model.context
        return self.micro_batch * sequence / self.mesh.cp

    @cached_property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        asked = self.config.train.model_copy(
            update={"micro_batch": self.micro_batch, "accumulate": None}
        )
        found = portions(asked, parts=self.mesh.data)
        return 1 if isinstance(found, Problem) else found.accumulate

    @cached_property
    def in_flight(self) -> float:
        """Micro-batches whose activations are held at once, each of all layers here."""
        pp, parallel = self.mesh.pp, self.config.parallel
        if pp == 1:
            return 1
        kind = parallel.schedule or "1f1b"
        if kind == "gpipe":
            return self.accumulate
        if kind not in SEVERAL:
            return min(pp - self.stage, self.accumulate)
        each = parallel.stages_each
        chunks = (each - 1) * pp + 2 * (pp - self.stage - 1) + 1
        return min(chunks / each, self.accumulate)

    # -------------------------------------------------------------- what stays

    @cached_property
    def held(self) -> int:
        """Parameters on this process."""
        return sum(shape.held(self.mesh) for shape in self.shapes)

    @cached_property
    def trained(self) -> int:
        """Those of them that are trained, or the adapters that are trained beside them."""
        if self.model.lora is None:
            return self.held
        chosen = (s for n, s in self.model.linears().items() if self.model.lora.chosen(n))
        adapters = sum(self.model.lora.rank * (s.inputs + s.outputs) for s in chosen)
        ways = self.mesh.dp_shard * self.mesh.cp if self.mesh.shards_rows else 1
        return -(-adapters * self.layers // (self.model.layers * ways))

    @cached_property
    def matrices(self) -> int:
        """Elements of the matrices of blocks, gathered."""
        return sum(s.whole(self.mesh) for s in self.shapes if s.role is Role.MATRIX)

    @property
    def state(self) -> float:
        """Bytes of optimizer state, and of copies that workers exchange."""
        optim, copies = self.config.optim, exchange_copies(self.config.parallel)
        kept = copies * 4 * self.trained
        if self.config.runtime.offload is not None:
            return kept
        if self.model.lora is not None:
            return kept + optim.state_bytes(Role.MATRIX) * self.trained
        kept += sum(optim.state_bytes(s.role) * s.held(self.mesh) for s in self.shapes)
        return kept + self._preconditioner

    @cached_property
    def _kfac(self) -> KfacConfig | None:
        settings = self.config.optim.preconditioning
        return settings if isinstance(settings, KfacConfig) else None

    @cached_property
    def collected(self) -> float:
        """Bytes of the sums of second moments that K-FAC collects in some steps."""
        if self._kfac is None:
            return 0.0
        return self.layers / self.model.layers * _collected(self._kfac, self.model)

    @property
    def _preconditioner(self) -> float:
        optim, share = self.config.optim, self.layers / self.model.layers
        if optim.preconditioning is None:
            return 0.0
        return share * _preconditioner_held(optim, self.model, self.mesh.processes // self.mesh.pp)

    @property
    def gradient_bytes(self) -> float:
        return 4.0 * self.trained

    def base(self) -> Parts:
        """What is there between two steps."""
        frozen = self.held if self.model.lora is not None else 0
        each = self.computing.itemsize if frozen else 4
        weights = each * self.held + (4 * self.trained if frozen else 0)
        tables = 0
        if self.model.positions == "rotary":
            tables = 4 * self.model.context * self.model.rotated
        return {"weights": weights + tables, "optimizer": self.state}


@lru_cache(maxsize=64)
def _collected(kfac: KfacConfig, model: GPTConfig) -> float:
    """Bytes of the sums that K-FAC collects for all layers, on any number of processes."""
    return kfac_cost(kfac, model.linears(), 1).collected


@lru_cache(maxsize=64)
def _preconditioner_held(optim: OptimizerConfig, model: GPTConfig, processes: int) -> float:
    """Bytes of a preconditioner on the process that has most, if all layers were there; kept, since
    it goes through them one by one and a search for layouts asks for it thousands of times."""
    match optim.preconditioning:
        case KfacConfig() as kfac:
            return kfac_cost(kfac, model.linears(), processes).held
        case SoapConfig():
            return preconditioner_bytes(optim, model.linears()) / processes
    return 0.0
