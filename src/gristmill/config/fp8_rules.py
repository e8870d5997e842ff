"""Rules for matrix products in fp8: precision, sizes and parallel layout."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.base.errors import Problem
from gristmill.config.model import Ability, GPTConfig
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig

FP8_MULTIPLE = 16
"""The sizes of matrix products in fp8 must be multiples of this."""


def fp8_fits(config: RunConfig) -> Iterator[Problem]:
    """All rules but those of the parallel layout."""
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
    unsupported = ("cpu", "mps", "xla") if "head" in precision.fp8 else ("mps", "xla")
    if runtime.device in unsupported:
        what = f"needs an NVIDIA GPU, and runtime.device is {runtime.device!r}"
        yield Problem(what, "precision.fp8", "leave it out, or train on a GPU")
    elif not runtime.kernels and not on_cpu:
        what = "needs a kernel, and runtime.kernels is false"
        yield Problem(what, "precision.fp8", "leave one of the two out")
    if model.adapters is not None:
        what = "needs trainable layers, and LoRA freezes them"
        yield Problem(what, "precision.fp8", "leave it out, or leave model.lora out")
    if precision.fp8_of_blocks and config.parallel.decentralized:
        what = "each worker would have its own fp8 scales of blocks"
        yield Problem(what, "precision.fp8", 'leave "mlp" and "attention" out')
    if isinstance(model, GPTConfig):
        for path, size in _operand_sizes(config, model).items():
            if size % FP8_MULTIPLE:
                what = f"{size} is not a multiple of {FP8_MULTIPLE}, which products in fp8 need"
                yield Problem(what, path, "change it, or leave precision.fp8 out")


def _operand_sizes(config: RunConfig, model: GPTConfig) -> dict[str, int]:
    """The dimensions of the operands; forward and backward products together sum over all."""
    precision, sizes = config.precision, {"model.width": model.width}
    if "head" in precision.fp8:
        sizes["model.vocab_multiple"] = model.vocab_multiple
    if precision.fp8_of_blocks:
        sizes["data.sequence"] = config.data.sequence or model.context
    return sizes | {
        f"model.{name}": size for name, size in _block_sizes(config, model, tp=1).items()
    }


def _block_sizes(config: RunConfig, model: GPTConfig, *, tp: int) -> dict[str, int]:
    """The dimensions inside of blocks on one of `tp` ranks."""
    sizes, parts = dict[str, int](), config.precision.fp8
    if "mlp" in parts:
        sizes["mlp_width"] = model.inner // tp
    if "attention" in parts:
        # The width of all key heads; queries are at least as wide.
        sizes["head_width"] = model.groups * model.head_size // tp
    return sizes


def fp8_layout_fits(config: RunConfig, mesh: Mesh) -> Iterator[Problem]:
    """The parallel layouts in which fp8 can be used."""
    precision, model = config.precision, config.model
    if "head" in precision.fp8 and mesh.tp > 1:
        what = "the head cannot use fp8 when tp shards it"
        yield Problem(what, "precision.fp8", 'leave "head" out, or set parallel.tp = 1')
    if not precision.fp8_of_blocks or not isinstance(model, GPTConfig):
        return
    if mesh.pp > 1:
        what = "pipeline stages do not support the fp8 scales of blocks"
        yield Problem(what, "precision.fp8", "leave it out, or set parallel.pp = 1")
    sizes = [("tp", size) for size in _block_sizes(config, model, tp=mesh.tp).values()]
    sizes.append(("cp", (config.data.sequence or model.context) // mesh.cp))
    for axis, size in sizes:
        if size % FP8_MULTIPLE and mesh.sizes[axis] > 1:
            what = f"leaves a size of {size} on a device, and fp8 needs multiples of {FP8_MULTIPLE}"
            yield Problem(what, f"parallel.{axis}", "change it, or leave precision.fp8 out")
