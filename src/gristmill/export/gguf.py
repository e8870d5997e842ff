"""Exports a model as a GGUF file for llama.cpp, in fp32, and verifies it before it gets its name.

    settings · tokenizer · name, shape and offset of each tensor · tensors, aligned

    read some rows of a tensor from the source -> finite? -> append to the file
    read the file with the gguf package        -> the same tensors, every bit as in the source?

llama.cpp has the computation of each architecture built in, so only models that GPT-2, Llama, Qwen2
or Qwen3 can express are exported. Of those it has one GELU only, the one with tanh. Its Llama
rotates neighbouring features instead of halves, so the rows of queries and keys are written in that
order. It has to split text as well: of the tokenizers, byte-level BPEs with GPT-2's pattern.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gristmill.base.errors import UserError, optional
from gristmill.base.files import require_room
from gristmill.checkpoint.model import StoredModel, chat_template
from gristmill.config.families import GPT2, LLAMA, QWEN2, QWEN3, Family
from gristmill.config.hf import differences
from gristmill.config.model import GPTConfig
from gristmill.export.staging import (
    read_rows,
    refuse_used_file,
    require_same,
    row_regions,
    staged_file,
    tensor_bytes,
)
from gristmill.models.families import (
    ForeignModule,
    TensorTable,
    gated,
    gates,
    keys,
    queries,
    table_tensors,
    values,
)
from gristmill.models.weights import ForeignTensor
from gristmill.text.chat.encoding import turn_ends
from gristmill.text.tokenizers.tokenizer import Tokenizer

SUFFIX = ".gguf"
_FAMILIES = (GPT2, LLAMA, QWEN2, QWEN3)
"""What llama.cpp has of the families of transformers."""


@dataclass(frozen=True)
class ExportedFile:
    """What was written; all weights were read back and compared with the source."""

    file: Path
    architecture: str
    bytes: int
    """Bytes of weights."""


def export_gguf(
    stored: StoredModel,
    file: Path,
    *,
    progress: Callable[[str, int, int], None] = lambda doing, done, total: None,
) -> ExportedFile:
    """Write and check a GGUF file. `progress` is called as by the export of a folder."""
    gguf = optional("gguf", extra="gguf", purpose="writing a GGUF file")
    config = stored.config
    if not isinstance(config, GPTConfig):
        what = f"{config.kind} models have no GGUF form that this program can write"
        raise UserError(what, where="export")
    family = _choose_architecture(config)
    tokenizer = _tokenizer(gguf, stored.tokenizer, vocab=stored.vocab)
    template = chat_template(stored)
    if template is not None:
        tokenizer["add_chat_template"] = template.source
        for end in turn_ends(stored.tokenizer, template) - {stored.tokenizer.end_of_text}:
            tokenizer["add_eot_token_id"] = end
    tensors = table_tensors(stored.meta_model(), _TABLES[family.type])
    size, done = sum(map(tensor_bytes, tensors)), 0
    refuse_used_file(file)
    require_room(file, needed=size, purpose="the model", remedy="give a file on a larger disk")

    def advance(doing: str, count: int) -> None:
        nonlocal done
        done += count
        progress(doing, done, 2 * size)

    with staged_file(file) as staging:
        writer = gguf.GGUFWriter(staging, family.type)
        _write_settings(writer, config, vocab=stored.vocab)
        for add, value in tokenizer.items():
            getattr(writer, add)(value)
        _write_tensors(writer, stored, tensors, advance)
        _compare(gguf.GGUFReader(staging), stored, tensors, advance)
    return ExportedFile(file, family.type, size)


def _choose_architecture(config: GPTConfig) -> Family:
    nearest = min(_FAMILIES, key=lambda family: len(_differences(config, family)))
    if lacking := _differences(config, nearest):
        raise UserError(
            f"llama.cpp cannot compute this model: the nearest, its {nearest.type}, has no "
            f"{', '.join(lacking)}",
            where="export",
            remedy="give a folder instead of a .gguf file, for transformers",
        )
    return nearest


def _differences(config: GPTConfig, family: Family) -> list[str]:
    wrong = differences(config, family)
    if family is GPT2 and config.activation in ("gelu", "relu"):
        wrong.append(f"activation = {config.activation!r}")
    return wrong


# ------------------------------------------------------------------ settings


def _write_settings(writer: Any, config: GPTConfig, *, vocab: int) -> None:
    writer.add_vocab_size(vocab)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.inner)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.groups)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.positions == "rotary":
        writer.add_rope_dimension_count(config.head_size)
        writer.add_rope_freq_base(config.wavelength)
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
    writer.add_file_type(0)  # all tensors in fp32


def _tokenizer(gguf: ModuleType, tokenizer: Tokenizer, *, vocab: int) -> dict[str, Any]:
    """What a file says about the tokenizer, by the writer's methods."""
    if tokenizer.definition is None:
        raise UserError(
            "llama.cpp does not know how this tokenizer splits text: it must be a byte-level BPE "
            "with GPT-2's pattern",
            where="export",
            remedy="give a folder instead of a .gguf file; llama.cpp's convert_hf_to_gguf.py knows "
            "more tokenizers",
        )
    model = json.loads(tokenizer.definition)["model"]
    texts = {id: token for token, id in model["vocab"].items()}
    kinds, tokens, types = gguf.TokenType, [], []
    for id in range(vocab):
        known = id < tokenizer.size
        if known and tokenizer.token_bytes(id):
            tokens.append(texts[id])
            types.append(kinds.NORMAL)
        elif known and (text := tokenizer.decode([id])):
            tokens.append(text)
            types.append(kinds.CONTROL)
        else:
            # Ids that the model has and the tokenizer has not still need a name of their own.
            tokens.append(f"[PAD{id}]")
            types.append(kinds.UNUSED)
    if len(tokenizer.prefix) > 1:
        raise UserError(
            "llama.cpp puts one token before a text, and this tokenizer several",
            where="export",
            remedy="give a folder instead of a .gguf file",
        )
    begin = tokenizer.prefix[0] if tokenizer.prefix else tokenizer.end_of_text
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": "gpt-2",
        "add_token_list": tokens,
        "add_token_types": types,
        "add_token_merges": merges,
        "add_bos_token_id": begin,
        "add_eos_token_id": tokenizer.end_of_text,
        "add_add_bos_token": bool(tokenizer.prefix),
    }


# ------------------------------------------------------------------ tensors


def _neighbours(rows: Sequence[range], config: GPTConfig) -> Iterator[range]:
    """For every head, features i and i + half one after the other."""
    (all_rows,), half = rows, config.head_size // 2
    for head in range(all_rows.start, all_rows.stop, config.head_size):
        for feature in range(head, head + half):
            yield range(feature, feature + 1)
            yield range(feature + half, feature + half + 1)


_GPT2 = TensorTable(
    prefix="",
    before=(
        ForeignModule("token_embd", "embedding"),
        ForeignModule("position_embd", "positions"),
    ),
    block="blk.{layer}.",
    in_block=(
        ForeignModule("attn_norm", "attention_norm", bias=True),
        ForeignModule("attn_qkv", "attention.qkv", bias=True),
        ForeignModule("attn_output", "attention.out", bias=True),
        ForeignModule("ffn_norm", "mlp_norm", bias=True),
        ForeignModule("ffn_up", "mlp.up", bias=True),
        ForeignModule("ffn_down", "mlp.down", bias=True),
    ),
    after=ForeignModule("output_norm", "norm", bias=True),
    head="output",
)
_QWEN2 = TensorTable(
    prefix="",
    before=(ForeignModule("token_embd", "embedding"),),
    block="blk.{layer}.",
    in_block=(
        ForeignModule("attn_norm", "attention_norm"),
        ForeignModule("attn_q", "attention.qkv", queries, bias=True),
        ForeignModule("attn_k", "attention.qkv", keys, bias=True),
        ForeignModule("attn_v", "attention.qkv", values, bias=True),
        ForeignModule("attn_output", "attention.out"),
        ForeignModule("ffn_norm", "mlp_norm"),
        ForeignModule("ffn_gate", "mlp.up", gates),
        ForeignModule("ffn_up", "mlp.up", gated),
        ForeignModule("ffn_down", "mlp.down"),
    ),
    after=ForeignModule("output_norm", "norm"),
    head="output",
)
_ORDERS = {
    "attn_q": lambda config: _neighbours(queries(config), config),
    "attn_k": lambda config: _neighbours(keys(config), config),
}
_LLAMA = replace(
    _QWEN2,
    in_block=tuple(
        replace(
            module,
            rows=_ORDERS.get(module.theirs, module.rows),
            bias=False if module.theirs.endswith("_norm") else None,
        )
        for module in _QWEN2.in_block
    ),
)
_QWEN3 = replace(
    _QWEN2,
    in_block=(
        *(replace(module, bias=False) for module in _QWEN2.in_block),
        ForeignModule("attn_q_norm", "attention.query_norm"),
        ForeignModule("attn_k_norm", "attention.key_norm"),
    ),
)
_TABLES = {"gpt2": _GPT2, "llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3}


def _write_tensors(
    writer: Any,
    stored: StoredModel,
    tensors: Sequence[ForeignTensor],
    advance: Callable[[str, int], None],
) -> None:
    """All tensors, some rows at a time: the package's own way has a whole tensor in memory."""
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("float32"), tensor_bytes(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        for tensor in tensors:
            for rows in read_rows(stored, tensor, advance):
                file.write(rows.numpy().data)
            writer.write_padding(file, tensor_bytes(tensor))
    finally:
        writer.close()


def _compare(
    reader: Any,
    stored: StoredModel,
    tensors: Sequence[ForeignTensor],
    advance: Callable[[str, int], None],
) -> None:
    """Compare every bit of the file with the source."""
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(written) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        data = written[tensor.name].reshape(tensor.shape)
        for rows in row_regions(tensor.shape):
            value = torch.from_numpy(data[rows.slices].copy())
            require_same(tensor.name, value, tensor.read(stored.weights, rows), stored)
            advance("reading back", value.nbytes)
