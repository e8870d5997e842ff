"""Exports a model as a Hugging Face folder that `transformers` loads, in memory that does not grow
with the number of layers, and verifies it before the folder gets its name.

    DIR/  model.safetensors, or model-00001-of-0000N.safetensors ... and an index of them
          tokenizer files · chat_template.jinja, if the model has one
          generation_config.json · config.json
          modeling_gristmill.py, if it is exported with the model's own code

    read some rows of a tensor from the source -> finite? -> fp32, transposed -> append to a file
    read some rows from both, folder and source -> are the bits the same?
    transformers loads the folder, we the source -> same logits and greedy tokens?

Everything is written under a temporary name and flushed; the folder gets its own name after all
checks. What a killed export leaves has the temporary name, and no config.json before the weights
are verified; the next export to the same folder removes it.

The last check holds the model in memory twice. In fp32 the logits must agree within 1e-5 (of the
largest logit, where that is above 1), and greedy continuations must be the same ids. If it needs
more than half of the free memory it is skipped, unless it is asked for, and the result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from gristmill.base.errors import Exit, UserError, optional
from gristmill.base.files import require_room, write_atomic, write_json
from gristmill.base.limits import free_memory
from gristmill.base.units import format_bytes
from gristmill.checkpoint.model import StoredModel, chat_template
from gristmill.checkpoint.tensorfile import StreamedTensor, open_hf_tensors, write_streamed
from gristmill.config.hf import (
    CODE_CLASS,
    CODE_MODULE,
    CODE_TYPE,
    choose_family,
    to_hf,
    to_hf_with_code,
)
from gristmill.config.model import GPTConfig
from gristmill.export.staging import (
    DTYPE,
    SHARD,
    Advance,
    divide_files,
    read_rows,
    refuse_used_folder,
    require_same,
    row_regions,
    staged_folder,
    tensor_bytes,
    write_index,
)
from gristmill.generate.engine import Engine
from gristmill.generate.sampling import Sampling
from gristmill.models.families import foreign_tensors, open_foreign
from gristmill.models.hf import hf_form
from gristmill.models.weights import ForeignTensor
from gristmill.text.chat.encoding import turn_ends
from gristmill.text.tokenizers.library import TOKENIZER_FILE
from gristmill.text.tokenizers.tokenizer import Tokenizer

TOLERANCE = 1e-5

Check = Literal["auto", "transformers", "files"]
"""Whether to compare with transformers: if the model fits twice into half of the free memory,
always, or never."""


@dataclass(frozen=True)
class Agreement:
    """How closely transformers agrees with the source."""

    largest_difference: float
    greedy_tokens: int


@dataclass(frozen=True)
class Exported:
    """What was written; all weights were read back and compared with the source."""

    folder: Path
    architecture: str
    """The class that transformers loads it with."""
    files: int
    """Files of weights."""
    bytes: int
    """Bytes of weights."""
    agreement: Agreement | None
    """None if the model was not compared with transformers."""
    skipped: str | None = None
    """Why it was not."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


@dataclass(frozen=True)
class _Target:
    """What a model becomes."""

    family: str
    architecture: str
    settings: dict[str, Any]
    """The content of config.json."""


def export(
    stored: StoredModel,
    folder: Path,
    *,
    code: bool = False,
    check: Check = "auto",
    shard: int = SHARD,
    progress: Callable[[str, int, int], None] = lambda doing, done, total: None,
) -> Exported:
    """Write and check a Hugging Face folder: of the first class of transformers that can express
    the model, or with `code` of the model's own. `progress` is called with what is being done, and
    the bytes done and in total: all weights are written, then read back."""
    end = stored.tokenizer.end_of_text
    target = _choose_target(stored, code=code)
    tensors = foreign_tensors(stored.meta_model(), target.family)
    size, done = sum(map(tensor_bytes, tensors)), 0
    skipped, agreement, theirs = _why_skipped(check, size), None, None
    notes: tuple[str, ...] = ()
    if skipped is None:
        theirs = _transformers_class(target)
    refuse_used_folder(folder)
    larger = "give a folder on a larger disk"
    require_room(folder, needed=size, purpose="the model", remedy=larger)
    files = divide_files({tensor.name: tensor_bytes(tensor) for tensor in tensors}, limit=shard)

    def advance(doing: str, count: int) -> None:
        nonlocal done
        done += count
        progress(doing, done, 2 * size)

    with staged_folder(folder) as staging:
        by_name = {tensor.name: tensor for tensor in tensors}
        for file, names in files.items():
            content = {
                name: StreamedTensor(
                    DTYPE, by_name[name].shape, partial(read_rows, stored, by_name[name], advance)
                )
                for name in names
            }
            write_streamed(staging / file, content, metadata={"format": "pt"})
        write_index(staging, files, size=size)
        _compare(stored, staging, tensors, target.family, advance)
        stored.tokenizer.save(staging)
        ends, template = [end], chat_template(stored)
        if template is not None:
            template.save(staging)
            ends += sorted(turn_ends(stored.tokenizer, template) - {end})
        stops = {"bos_token_id": end, "eos_token_id": ends if len(ends) > 1 else end}
        write_json(staging / "generation_config.json", stops)
        if code:
            own_code = resources.files("gristmill.export") / f"{CODE_MODULE}.py"
            write_atomic(staging / own_code.name, own_code.read_text(encoding="utf-8"))
        write_json(staging / "config.json", target.settings)
        if theirs is not None:
            advance("checking with transformers", 0)
            agreement = _compare_with_transformers(theirs, stored, staging, folder)
            notes = () if code else tuple(_tokenizer_notes(stored.tokenizer, staging))
    return Exported(folder, target.architecture, len(files), size, agreement, skipped, notes)


def _choose_target(stored: StoredModel, *, code: bool) -> _Target:
    config = stored.config
    form = hf_form(stored.meta_model(), end_of_text=stored.tokenizer.end_of_text)
    if form is not None:
        if code:
            what = f"this model is a {form.architecture}, which transformers has already"
            raise UserError(what, where="--code", remedy="leave it out")
        return _Target(form.settings["model_type"], form.architecture, form.settings)
    if not isinstance(config, GPTConfig):
        raise UserError(
            f"{config.kind} models have no Hugging Face form that this program can write",
            where="export",
            remedy="such a model can be used with `gristmill generate` and `evaluate`",
        )
    named: dict[str, int] = {"vocab": stored.vocab, "end_of_text": stored.tokenizer.end_of_text}
    if code:
        return _Target(CODE_TYPE, CODE_CLASS, to_hf_with_code(config, **named))
    family = choose_family(config)
    return _Target(family.type, family.architecture, to_hf(config, family, **named))


def _why_skipped(check: Check, size: int) -> str | None:
    """Why a model of this size is not compared with transformers; None if it is."""
    skipped = "not compared with transformers"
    if check != "auto":
        return skipped if check == "files" else None
    needed, free = 2 * size, free_memory()
    if needed <= free // 2:
        return None
    return (
        f"{skipped}, since that takes {format_bytes(needed)} of memory, more than half of the "
        f"{format_bytes(free)} that are free"
    )


# ------------------------------------------------------------------ weights, some rows at a time


def _compare(
    stored: StoredModel,
    folder: Path,
    tensors: Sequence[ForeignTensor],
    family: str,
    advance: Advance,
) -> None:
    """Read the folder as a run that starts from it would, and compare every bit with the source."""
    written = open_hf_tensors(folder)
    assert set(written.shapes) == {tensor.name for tensor in tensors}
    converted = open_foreign(written, stored.meta_model(), family)
    for name, shape in converted.shapes.items():
        for rows in row_regions(shape):
            value, wanted = converted.read(name, rows), stored.weights.read(name, rows)
            require_same(name, value, wanted, stored)
            advance("reading back", value.nbytes)
    for tensor in tensors:
        if tensor.ours is None:
            value = written.read(tensor.name)
            require_same(tensor.name, value, torch.full(tensor.shape, tensor.constant), stored)
            advance("reading back", value.nbytes)


# ------------------------------------------------------------------ transformers


def _transformers_class(target: _Target) -> Any:
    """The class that transformers loads an export with."""
    transformers = optional("transformers", extra="hf", purpose="checking an export")
    transformers.utils.logging.disable_progress_bar()
    if target.family == CODE_TYPE:
        # The bytes that are exported, but not loaded from there: transformers would keep a copy of
        # them in its cache.
        from gristmill.export.modeling_gristmill import GristmillForCausalLM

        return GristmillForCausalLM
    model_class = getattr(transformers, target.architecture, None)
    if model_class is None:
        raise UserError(
            f"transformers {transformers.__version__} has no {target.architecture}",
            where="export",
            remedy="pip install --upgrade transformers, or give --check files",
        )
    return model_class


_TEXT = "In 1234, the mill's  wheel DIDN'T\n\n  turn... übung 你好\t→ x=7\r\n"
"""Text that tokenizers split in different ways."""


def _tokenizer_notes(tokenizer: Tokenizer, folder: Path) -> Iterator[str]:
    """Whether transformers takes another tokenizer than the one in the folder, as it does for some
    types of models whatever the folder says, or none."""
    if not (folder / TOKENIZER_FILE).is_file():
        return
    transformers = optional("transformers", extra="hf", purpose="checking an export")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        ids = loaded(_TEXT, add_special_tokens=False)["input_ids"]
    except Exception as error:  # each class of tokenizers has its own errors
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        yield f"transformers' AutoTokenizer cannot load the tokenizer of this model: {line}"
        return
    if ids != tokenizer.encode(_TEXT):
        yield (
            f"transformers' AutoTokenizer takes {type(loaded).__name__} for this type of model, "
            "which splits text otherwise: load the tokenizer with PreTrainedTokenizerFast instead"
        )


def _compare_with_transformers(
    model_class: Any, stored: StoredModel, staging: Path, folder: Path
) -> Agreement:
    """Compute with the written folder and with the source; `folder` is its final name."""
    theirs = model_class.from_pretrained(staging).eval()
    ours = stored.load(torch.device("cpu")).model
    generator = torch.Generator().manual_seed(0)
    length = min(64, ours.config.context)
    ids_BT = torch.randint(0, ours.vocab, (4, length), generator=generator)
    prompt_BT, tokens = ids_BT[:1, : max(1, length // 4)], max(1, length // 2)
    with torch.inference_mode():
        logits = ours(ids_BT)
        assert isinstance(logits, torch.Tensor)
        difference = float((theirs(ids_BT).logits - logits).abs().max())
        # fp32 rounds in proportion: a confident model has logits far above 1.
        allowed = TOLERANCE * max(1.0, float(logits.abs().max()))
        greedy_BT = prompt_BT
        for _ in range(tokens):
            greedy_BT = torch.cat((greedy_BT, theirs(greedy_BT).logits[:, -1:].argmax(-1)), dim=1)
    prompt, greedy = prompt_BT[0].tolist(), Sampling(temperature=0.0)
    (continuation,) = Engine(ours).generate([prompt], tokens=tokens, sampling=greedy)
    same = prompt + continuation == greedy_BT[0].tolist()
    # A difference that is not a number is not small either.
    if not difference <= allowed or not same:
        raise UserError(
            f"transformers' logits differ by {difference:.1e} (allowed: {allowed:.0e}) and its "
            f"greedy tokens are {'the same' if same else 'different'}; nothing was exported",
            where=str(folder),
            exit=Exit.INTERNAL,
        )
    return Agreement(difference, tokens)
