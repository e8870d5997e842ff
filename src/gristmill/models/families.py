"""The tensors of Hugging Face's families: which rows of which of our tensors they are.

    qkv of ours        all queries, all keys, all values
    GPT-2              the same, transposed
    Llama, Qwen, Neo   three tensors
    GPT-NeoX           query, key and value of one head, then of the next
    NanoChat           three tensors, with the halves of each query and key swapped: it rotates them
                       the other way round

SwiGLU's gate and up are the halves of our `mlp.up`. Settings are in `config/families.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.model import GPTConfig
from gristmill.models.gpt import GPT
from gristmill.models.spec import CausalLM
from gristmill.models.weights import (
    ForeignTensor,
    ForeignWeights,
    SharedRows,
    Weights,
    WeightsInMemory,
)

RowOrder = Callable[[GPTConfig], Iterable[range]]
"""Our rows, in the order of theirs."""


def queries(config: GPTConfig) -> list[range]:
    """The rows of all queries."""
    return [range(config.heads * config.head_size)]


def keys(config: GPTConfig) -> list[range]:
    """The rows of all keys."""
    return [_after(queries(config), config.groups * config.head_size)]


def values(config: GPTConfig) -> list[range]:
    """The rows of all values."""
    return [_after(keys(config), config.groups * config.head_size)]


def by_head(config: GPTConfig) -> Iterator[range]:
    """The query, key and value of one head, then those of the next."""
    stacked = (_heads(rows(config), config) for rows in (queries, keys, values))
    return itertools.chain.from_iterable(zip(*stacked, strict=True))


def swapped_queries(config: GPTConfig) -> Iterator[range]:
    """The second half of a query, then the first."""
    return _halves_swapped(queries(config), config)


def swapped_keys(config: GPTConfig) -> Iterator[range]:
    """The second half of a key, then the first."""
    return _halves_swapped(keys(config), config)


def gates(config: GPTConfig) -> list[range]:
    """The half of SwiGLU's input that is activated."""
    return [range(config.inner)]


def gated(config: GPTConfig) -> list[range]:
    """The other half."""
    return [_after(gates(config), config.inner)]


def _after(rows: list[range], count: int) -> range:
    return range(rows[-1].stop, rows[-1].stop + count)


def _heads(rows: list[range], config: GPTConfig) -> Iterator[range]:
    (all_rows,), size = rows, config.head_size
    return (range(first, first + size) for first in range(all_rows.start, all_rows.stop, size))


def _halves_swapped(rows: list[range], config: GPTConfig) -> Iterator[range]:
    for head in _heads(rows, config):
        middle = head.start + len(head) // 2
        yield range(middle, head.stop)
        yield range(head.start, middle)


@dataclass(frozen=True)
class ForeignModule:
    """A module of theirs with a weight, and a bias unless it is never there."""

    theirs: str
    ours: str
    rows: RowOrder | None = None
    """All rows if not given."""
    bias: bool | None = False
    """Whether it has a bias; None if the settings decide."""
    transposed: bool = False


@dataclass(frozen=True)
class TensorTable:
    """The modules of a family."""

    prefix: str
    """What all names but the head's begin with; files of a bare model lack it."""
    before: tuple[ForeignModule, ...]
    block: str
    in_block: tuple[ForeignModule, ...]
    after: ForeignModule | None
    head: str = "lm_head"
    other_head: str | None = None
    """Another name that files have for it."""

    def modules(self, layers: int) -> Iterator[ForeignModule]:
        """In the order in which the model computes, without the head."""
        for module in self.before:
            yield replace(module, theirs=f"{self.prefix}{module.theirs}")
        for layer in range(layers):
            theirs = f"{self.prefix}{self.block.format(layer=layer)}"
            for module in self.in_block:
                ours = f"blocks.{layer}.{module.ours}"
                yield replace(module, theirs=f"{theirs}{module.theirs}", ours=ours)
        if self.after is not None:
            yield replace(self.after, theirs=f"{self.prefix}{self.after.theirs}")


# ------------------------------------------------------------------ the families


_GPT2 = TensorTable(
    prefix="transformer.",
    before=(
        ForeignModule("wte", "embedding"),
        ForeignModule("wpe", "positions"),
    ),
    block="h.{layer}.",
    in_block=(
        ForeignModule("ln_1", "attention_norm", bias=True),
        ForeignModule("attn.c_attn", "attention.qkv", bias=True, transposed=True),
        ForeignModule("attn.c_proj", "attention.out", bias=True, transposed=True),
        ForeignModule("ln_2", "mlp_norm", bias=True),
        ForeignModule("mlp.c_fc", "mlp.up", bias=True, transposed=True),
        ForeignModule("mlp.c_proj", "mlp.down", bias=True, transposed=True),
    ),
    after=ForeignModule("ln_f", "norm", bias=True),
)
_LLAMA = TensorTable(
    prefix="model.",
    before=(ForeignModule("embed_tokens", "embedding"),),
    block="layers.{layer}.",
    in_block=(
        ForeignModule("input_layernorm", "attention_norm"),
        ForeignModule("self_attn.q_proj", "attention.qkv", queries, bias=None),
        ForeignModule("self_attn.k_proj", "attention.qkv", keys, bias=None),
        ForeignModule("self_attn.v_proj", "attention.qkv", values, bias=None),
        ForeignModule("self_attn.o_proj", "attention.out", bias=None),
        ForeignModule("post_attention_layernorm", "mlp_norm"),
        ForeignModule("mlp.gate_proj", "mlp.up", gates, bias=None),
        ForeignModule("mlp.up_proj", "mlp.up", gated, bias=None),
        ForeignModule("mlp.down_proj", "mlp.down", bias=None),
    ),
    after=ForeignModule("norm", "norm"),
)
_QWEN2 = replace(
    _LLAMA,
    in_block=tuple(
        replace(one, bias=True) if one.ours == "attention.qkv" else one for one in _LLAMA.in_block
    ),
)
_QWEN3 = replace(
    _LLAMA,
    in_block=(
        *_LLAMA.in_block,
        ForeignModule("self_attn.q_norm", "attention.query_norm"),
        ForeignModule("self_attn.k_norm", "attention.key_norm"),
    ),
)
_GPT_NEOX = TensorTable(
    prefix="gpt_neox.",
    before=(ForeignModule("embed_in", "embedding"),),
    block="layers.{layer}.",
    in_block=(
        ForeignModule("input_layernorm", "attention_norm", bias=True),
        ForeignModule("attention.query_key_value", "attention.qkv", by_head, bias=True),
        ForeignModule("attention.dense", "attention.out", bias=True),
        ForeignModule("post_attention_layernorm", "mlp_norm", bias=True),
        ForeignModule("mlp.dense_h_to_4h", "mlp.up", bias=True),
        ForeignModule("mlp.dense_4h_to_h", "mlp.down", bias=True),
    ),
    after=ForeignModule("final_layer_norm", "norm", bias=True),
    # Transformers 4 knows this name only; transformers 5 knows both.
    head="embed_out",
    other_head="lm_head",
)
_GPT_NEO = replace(
    _GPT2,
    in_block=(
        ForeignModule("ln_1", "attention_norm", bias=True),
        ForeignModule("attn.attention.q_proj", "attention.qkv", queries),
        ForeignModule("attn.attention.k_proj", "attention.qkv", keys),
        ForeignModule("attn.attention.v_proj", "attention.qkv", values),
        ForeignModule("attn.attention.out_proj", "attention.out", bias=True),
        ForeignModule("ln_2", "mlp_norm", bias=True),
        ForeignModule("mlp.c_fc", "mlp.up", bias=True),
        ForeignModule("mlp.c_proj", "mlp.down", bias=True),
    ),
)
_NANOCHAT = TensorTable(
    prefix="model.",
    before=(ForeignModule("embed_tokens", "embedding"),),
    block="layers.{layer}.",
    in_block=(
        ForeignModule("self_attn.q_proj", "attention.qkv", swapped_queries),
        ForeignModule("self_attn.k_proj", "attention.qkv", swapped_keys),
        ForeignModule("self_attn.v_proj", "attention.qkv", values),
        ForeignModule("self_attn.o_proj", "attention.out"),
        ForeignModule("mlp.fc1", "mlp.up"),
        ForeignModule("mlp.fc2", "mlp.down"),
    ),
    after=None,
)
TABLES = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gpt_neox": _GPT_NEOX,
    "gpt_neo": _GPT_NEO,
    "nanochat": _NANOCHAT,
}
"""By `model_type`."""


# ------------------------------------------------------------------ the tensors of a model


def foreign_tensors(model: CausalLM, family: str) -> list[ForeignTensor]:
    """All tensors that a model has in a family that can express it, in the order in which it
    computes. The model needs no memory. Families without a table have the model's own names."""
    if family not in TABLES or not isinstance(model, GPT):
        return [_tensor(name, name, shape, None) for name, shape in _shapes(model).items()]
    return table_tensors(model, TABLES[family])


def table_tensors(model: CausalLM, table: TensorTable) -> list[ForeignTensor]:
    """As `foreign_tensors`, from the table of a family."""
    assert isinstance(model, GPT), "the settings of other models are refused"
    config, shapes = model.config, _shapes(model)
    modules = list(table.modules(config.layers))
    if not config.tie_head:
        modules.append(ForeignModule(table.head, "head"))
    tensors, covered = [], set()
    for module in modules:
        for kind, there in (("weight", True), ("bias", module.bias)):
            ours = f"{module.ours}.{kind}"
            if not (config.bias if there is None else there):
                continue
            covered.add(ours)
            name = f"{module.theirs}.{kind}"
            rows = None if module.rows is None else module.rows(config)
            if ours in shapes:
                transposed = module.transposed and kind == "weight"
                tensors.append(_tensor(name, ours, shapes[ours], rows, transposed=transposed))
            else:
                weight = shapes.get(f"{module.ours}.weight")
                if weight is None:  # the gain of a norm that our model computes without one
                    per_head = module.ours.endswith(("query_norm", "key_norm"))
                    count = config.head_size if per_head else config.width
                else:
                    count = weight[0]
                count = count if rows is None else sum(map(len, rows))
                constant = 1.0 if kind == "weight" else 0.0
                tensors.append(ForeignTensor(name, (count,), None, constant=constant))
    assert covered >= set(shapes), f"no place for {sorted(set(shapes) - covered)}"
    return tensors


def _shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """The shapes of our tensors without padding."""
    tables = model.vocabulary_parameters()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {n: (model.vocab, *shape[1:]) if n in tables else shape for n, shape in shapes.items()}


def _tensor(
    name: str,
    ours: str,
    shape: tuple[int, ...],
    rows: Iterable[range] | None,
    *,
    transposed: bool = False,
) -> ForeignTensor:
    shared, begin = [], 0
    for one in [range(shape[0])] if rows is None else rows:
        shared.append(SharedRows(one, range(begin, begin + len(one))))
        begin += len(one)
    shape = (begin, *shape[1:])
    shape = shape[::-1] if transposed else shape
    return ForeignTensor(name, shape, ours, tuple(shared), transposed)


def open_foreign(theirs: Weights, model: CausalLM, family: str) -> ForeignWeights:
    """The weights of a family's model under our names; refuses what does not fit the model, which
    needs no memory."""
    tensors = foreign_tensors(model, family)
    if family not in TABLES or not isinstance(model, GPT):
        return ForeignWeights(theirs, tensors)
    table = TABLES[family]
    other = {f"{table.other_head}.weight": f"{table.head}.weight"} if table.other_head else {}
    # Files of models with a tied head may have it all the same.
    unused = [f"{table.head}.weight"] if model.config.tie_head else []
    return ForeignWeights(theirs, tensors, prefix=table.prefix, other_names=other, unused=unused)


def foreign_state(model: CausalLM, family: str) -> dict[str, torch.Tensor]:
    """The weights of a model in memory under a family's names, in fp32 on the CPU, without
    padding."""
    weights = WeightsInMemory(dict(model.named_parameters()))
    return {
        foreign_tensor.name: foreign_tensor.read(weights, TensorSlice.whole(foreign_tensor.shape))
        for foreign_tensor in foreign_tensors(model, family)
    }
