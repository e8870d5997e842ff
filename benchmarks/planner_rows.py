"""Measured training steps that other people published, as work for the formula of `gristmill plan`.

`planner/published_rows.csv` has one row for each figure, with its source; a blank field was not
printed. `planner/vtrain_multi.csv` and `vtrain_single.csv` are the tables of VIA-Research/vTrain.
What a program does (whether its attention keeps scores, whether gradients are summed beside the
backward pass) is the same for all rows of a source and comes from its documentation, never from
the figures. A blank micro-batch is the one that is planned to be fastest.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill.config.parallel import Mesh
from gristmill.plan.hardware import Hardware, Link
from gristmill.plan.step import Program, Shape, Work, model_flops, time_step

FOLDER = Path(__file__).parent / "planner"

UNFUSED = Program(flash=False, fused=False, sequence_parallel=False, overlap_data=False)
MEGATRON = Program(
    divided_optimizer=True, overlap_tensor=True, gradient_bytes=2, keeps_fp8_weights=True
)
PROGRAMS = {
    # Megatron-LM of 2021 sums gradients in fp32 after the backward pass.
    "M21": UNFUSED,
    # vTrain measured Megatron-DeepSpeed: gradients in fp16, after the backward pass.
    "VT": replace(UNFUSED, gradient_bytes=2),
    "SP": replace(UNFUSED, sequence_parallel=True),
    "MT": UNFUSED,
    # MegaScale's baseline is Megatron-LM with flash attention; its own rows have parallel blocks
    # and hide the collectives of tp.
    "MS-b": Program(fused=False, overlap_data=False, divided_optimizer=True),
    "MS-m": Program(fused=False, parallel_block=True, overlap_tensor=True, divided_optimizer=True),
    # Megatron-LM since 2024 hides the collectives of tp and dp and sends gradients in bf16.
    "M24": MEGATRON,
    "MB": MEGATRON,
    "L3": replace(MEGATRON, overlap_tensor=False, gradient_bytes=4),
    # FlashAttention 2 for nanotron, torchtitan and llm-foundry. nanotron counts the head when it
    # divides layers among stages; that it hides no data-parallel communication is a guess from its
    # figures, the only one of this table.
    "NT": Program(fused=False, native=False, balanced=True, overlap_data=False),
    "TT": Program(native=False),
    "LF": Program(fused=False, native=False, gradient_bytes=2),
}
"""What the programs do, by the letters that the ids of their rows begin with."""


@dataclass(frozen=True)
class Row:
    """A published figure."""

    id: str
    group: str
    """The source, as far as errors are counted apart."""
    gpu: str
    link: str
    size: str
    """The model, for those that are held out together."""
    work: Work
    seconds: float
    """Of one step."""
    printed: bool
    """Whether shape, layout and micro-batch are all printed."""

    @property
    def blank(self) -> bool:
        """Whether the micro-batch was not printed."""
        return self.work.micro_batch == 0


def multi_rows() -> Iterator[Row]:
    """vTrain's measurements on up to 512 A100."""
    for number, row in enumerate(_read("vtrain_multi.csv")):
        yield _vtrain(f"VT-{number + 1}", row, group="vTrain", size=row["Parameters (billion)"])


def single_rows() -> Iterator[Row]:
    """vTrain's table for one node."""
    for number, row in enumerate(_read("vtrain_single.csv")):
        yield _vtrain(f"VS-{number + 1}", row, group="vTrain-1", size=row["hidden size"])


def _vtrain(name: str, row: dict[str, str], *, group: str, size: str) -> Row:
    width = int(row["hidden size"])
    heads = int(row["attention heads"])
    shape = Shape(
        layers=int(row["# layers"]),
        width=width,
        heads=heads,
        groups=heads,
        head_size=width // heads,
        inner=4 * width,
        rows=51200,
    )
    mesh = Mesh(
        pp=int(row["pipeline parallelism"]),
        dp_replicate=int(row["data parallelism"]),
        tp=int(row["tensor parallelism"]),
    )
    work = Work(
        shape,
        int(row["sequence length"]),
        int(row["global batch"]),
        int(row["micro batch"]),
        mesh,
        "full",
        program=PROGRAMS["VT"],
    )
    seconds = float(row["iteration time (ms)"]) / 1e3
    return Row(name, group, "a100-80gb", "hdr200-half", size, work, seconds, True)


def own_rows() -> Iterator[Row]:
    """What was measured on one H200 of ours: this program and two peers, GPT-2's shapes."""
    for row in _read("own_rows.csv"):
        width, heads = int(row["hidden"]), int(row["heads"])
        shape = Shape(
            int(row["layers"]), width, heads, heads, width // heads, 4 * width, int(row["vocab"])
        )
        batch = int(row["micro_batch"])
        work = Work(shape, int(row["seq"]), batch, batch, Mesh())
        seconds = batch * work.sequence / float(row["tokens_per_second"])
        yield Row(row["id"], "own", "h200", "ndr400", f"{width}", work, seconds, True)


_GPUS = {
    "A100-80": ("a100-80gb", "hdr200"),
    "A100-40? (llm-analysis) / A100-80 (paper)": ("a100-80gb", "hdr200"),
    "H100": ("h100-80gb", "ndr400"),
    "H100-80": ("h100-80gb", "ndr400"),
    "H100-80 700 W": ("h100-80gb", "ndr400"),
    "DGX-H100": ("h100-80gb", "ndr400"),
    "H100-96 HBM2e 500 W": ("h100-96gb", "ndr400"),
    "H200": ("h200", "ndr400"),
}


def published_rows(folder: Path = FOLDER) -> Iterator[Row]:
    """Every row that is a time or a speed of a dense model whose layout is printed."""
    for row in _read("published_rows.csv", folder):
        made = _published(row)
        if made is not None:
            yield made


def _published(row: dict[str, str]) -> Row | None:
    name = row["id"]
    kind = name.split("-")[0]
    if kind == "SPm" or not row["layers"] or not row["tp"] or row["gpu"] not in _GPUS:
        return None
    width, heads = int(row["hidden"]), int(row["heads"])
    gated = kind.startswith("NT") or int(row["ffn"]) not in (4 * width,)
    shape = Shape(
        layers=int(row["layers"]),
        width=width,
        heads=heads,
        groups=int(row["kv_heads"] or heads),
        head_size=width // heads,
        inner=int(row["ffn"]),
        rows=int(row["vocab"]),
        gated=gated,
        tied=not (kind in ("L3", "TT", "MB") or (kind.startswith("NT") and width > 3072)),
    )
    micro = int(row["micro_batch"] or 0)
    pp, tp, cp = (int(row[axis] or 1) for axis in ("pp", "tp", "cp"))
    data = int(row["dp"] or 1)
    accumulate = 1
    if kind == "NTtp":
        data = 1
    batch = int(row["global_batch_seqs"] or 0) or data * micro * accumulate
    sharding = row["sharding"]
    sharded = sharding.startswith(("fsdp", "zero3")) and not sharding.startswith("fsdp (")
    mesh = Mesh(
        pp=pp,
        cp=cp,
        tp=tp,
        dp_shard=data if sharded else 1,
        dp_replicate=1 if sharded else data,
    )
    if kind == "TT" and pp > 1:  # a "local batch" that the pipeline cuts into micro-batches of 1
        micro = 1
    program = _program(name)
    if sharding == "zero1":
        program = replace(program, divided_optimizer=True)
    if "eager" in row["note"] or kind == "NTtp":
        program = replace(program, fused=False)
    if "async TP" in row["note"]:
        program = replace(program, overlap_tensor=True)
    interleaved = {"": 1, "interleaved": 2}.get(row["vp"])
    stages = int(row["vp"]) if interleaved is None else interleaved
    if kind.startswith("M21") and pp > 1 and not row["vp"]:
        stages = 2 if int(row["layers"]) // pp % 2 == 0 else 1
    if kind in ("M24", "L3") and pp > 1:  # interleaved, as finely as layers allow
        stages = max(1, int(row["layers"]) // pp)
    recompute = row["recompute"].split()[0] if row["recompute"] else "none"
    recompute = {
        "not": "none",
        "selective": {"SP": "attention", "TT": "products"}.get(kind, "selective"),
    }.get(recompute, recompute)
    in_fp8 = "8" in row["precision"].replace("bf16", "")
    work = Work(
        shape,
        int(row["seq"]),
        batch,
        micro,
        mesh,
        recompute,
        stages,
        "weights" if sharding == "fsdp grad_op" else "nothing",
        fp8=frozenset(("attention", "mlp") if in_fp8 else ()),
        program=program,
    )
    gpu, link = _GPUS[row["gpu"]]
    seconds = _seconds(row, work, mesh.processes)
    if seconds is None:
        return None
    return Row(name, kind, gpu, link, f"{width}x{shape.layers}", work, seconds, micro > 0)


def _program(name: str) -> Program:
    """What the program of a row does."""
    if name.startswith("MS"):
        return PROGRAMS["MS-m" if "-m" in name else "MS-b"]
    return PROGRAMS[next(key for key in PROGRAMS if name.startswith(key))]


def _seconds(row: dict[str, str], work: Work, gpus: int) -> float | None:
    """Of a step, from what was printed."""
    value, quantity, shape = float(row["value"]), row["quantity"], work.shape
    tokens = work.batch * work.sequence
    if quantity.startswith("s/iteration"):
        return value
    if quantity.startswith("tokens/s/GPU"):
        return tokens / (value * gpus)
    if quantity.startswith("TFLOP/s/GPU incl"):  # Megatron 2021: 96 B s l h^2 (1 + s/6h + V/16lh)
        flops = 96 * tokens * shape.layers * shape.width**2
        flops *= 1 + work.sequence / (6 * shape.width)
        flops += 6 * tokens * shape.width * shape.rows
        return flops / (value * 1e12 * gpus)
    if quantity.startswith(("model TFLOP", "TFLOP/s/GPU")):
        halved = row["id"].startswith("L3")
        attention = 6 * shape.layers * shape.features * work.sequence
        flops = model_flops(shape, work.sequence) - (attention if halved else 0)
        return flops * tokens / (value * 1e12 * gpus)
    if quantity.startswith("MFU"):
        peak = 989e12 if row["gpu"].startswith("H") else 312e12
        return model_flops(shape, work.sequence) * tokens / (value / 100 * peak * gpus)
    return None


def predict(row: Row, hardware: Hardware) -> float:
    """Seconds of the row's step, as planned; the fastest micro-batch where none was printed."""
    if not row.blank:
        return time_step(row.work, hardware).seconds
    own = row.work.batch // row.work.mesh.data
    sizes = [size for size in (1, 2, 4, 8) if own % size == 0]
    return min(time_step(replace(row.work, micro_batch=size), hardware).seconds for size in sizes)


def on(row: Row, hardware: dict[str, Hardware], links: dict[str, Link]) -> Hardware:
    """The machine of a row."""
    return replace(hardware[row.gpu], between=links[row.link])


def _read(name: str, folder: Path = FOLDER) -> list[dict[str, str]]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))
