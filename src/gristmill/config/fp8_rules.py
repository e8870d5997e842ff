"""What products in fp8 ask of a run: formats, sizes, and how it is divided."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.base.errors import Problem
from gristmill.config.model import Ability, GPTConfig
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig

FP8_MULTIPLE = 16
"""Matrix products in fp8 are of sizes that are multiples of this."""


def fp8_fits(config: RunConfig) -> Iterator[Problem]:
    """Everything but the layout."""
    precision, runtime, model = config.precision, config.runtime, config.model
    if not precision.fp8:
        return
    if Ability.FP8 not in model.abilities:
        what = f"needs {Ability.FP8}, which {model.kind} models do not have"
        yield Problem(what, "precision.fp8", "leave it out")
    on_cpu = runtime.device == "cpu"
    if precision.compute not in ("bf16", "auto", *(("fp32",) if on_cpu else ())):
        what = f"needs compute = 'bf16', not {precision.compute!r}"
        remedy = 'set precision.compute = "bf16", or leave fp8 out'
        yield Problem(what, "precision.fp8", remedy)
    without = ("cpu", "mps", "xla") if "head" in precision.fp8 else ("mps", "xla")
    if runtime.device in without:
        what = f"needs an NVIDIA GPU, and runtime.device is {runtime.device!r}"
        yield Problem(what, "precision.fp8", "leave it out, or train on a GPU")
    elif not runtime.kernels and not on_cpu:
        what = "needs a kernel, and runtime.kernels is false"
        yield Problem(what, "precision.fp8", "leave one of the two out")
    if model.adapters is not None:
        what = "is for training the layers themselves, which stay as they are"
        yield Problem(what, "precision.fp8", "leave it out, or leave model.lora out")
    if precision.fp8_of_blocks and config.parallel.decentralized:
        what = "each worker would have its own scales of blocks in fp8"
        yield Problem(what, "precision.fp8", 'leave "mlp" and "attention" out')
    if isinstance(model, GPTConfig):
        for path, size in _sizes(config, model).items():
            if size % FP8_MULTIPLE:
                what = f"{size} is not a multiple of {FP8_MULTIPLE}, which products in fp8 need"
                yield Problem(what, path, "change it, or leave precision.fp8 out")


def _sizes(config: RunConfig, model: GPTConfig) -> dict[str, int]:
    """Of the operands: products sum along each of their dimensions, one way or the other."""
    precision, sizes = config.precision, {"model.width": model.width}
    if "head" in precision.fp8:
        sizes["model.vocab_multiple"] = model.vocab_multiple
    if precision.fp8_of_blocks:
        sizes["data.sequence"] = config.data.sequence or model.context
    return sizes | {f"model.{name}": size for name, size in _inside(config, model, tp=1).items()}


def _inside(config: RunConfig, model: GPTConfig, *, tp: int) -> dict[str, int]:
    """The sizes inside of blocks on one of `tp` processes."""
    sizes, parts = dict[str, int](), config.precision.fp8
    if "mlp" in parts:
        sizes["mlp_width"] = model.inner // tp
    if "attention" in parts:
        # Of keys and values together; queries are at least as wide.
        sizes["head_width"] = model.groups * model.head_size // tp
    return sizes


def fp8_layout_fits(config: RunConfig, mesh: Mesh) -> Iterator[Problem]:
    """How a run with products in fp8 may be divided."""
    precision, model = config.precision, config.model
    if "head" in precision.fp8 and mesh.tp > 1:
        what = "the head's products cannot be in fp8 when tp divides the head"
        yield Problem(what, "precision.fp8", 'leave "head" out, or set parallel.tp = 1')
    if not precision.fp8_of_blocks or not isinstance(model, GPTConfig):
        return
    if mesh.pp > 1:
        what = "the scales of blocks in fp8 are not measured in pipeline stages"
        yield Problem(what, "precision.fp8", "leave it out, or set parallel.pp = 1")
    sizes = [("tp", size) for size in _inside(config, model, tp=mesh.tp).values()]
    sizes.append(("cp", (config.data.sequence or model.context) // mesh.cp))
    for axis, size in sizes:
        if size % FP8_MULTIPLE and mesh.sizes[axis] > 1:
            what = f"leaves {size} on a device, and fp8 needs multiples of {FP8_MULTIPLE}"
            yield Problem(what, f"parallel.{axis}", "change it, or leave precision.fp8 out")
