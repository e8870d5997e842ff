"""Options of Megatron-LM and Megatron-DeepSpeed about data, tokenizers and folders."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill.dialects.draft import Remark, TranslationDraft, run_name
from gristmill.dialects.megatron_schedule_rules import batch_levels

_BY_NAME = (
    *("HuggingFaceTokenizer", "PretrainedFromHF", "Llama2Tokenizer"),
    *("SentencePieceTokenizer", "GPTSentencePieceTokenizer"),
)
"""Tokenizers that have one file, or a name."""
_FILES = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
"""Names by which a folder's vocabulary and merges are found."""
_NUMBER = re.compile(r"[.0-9]+")
_DEEPSPEED = (
    *("--deepspeed", "--deepspeed_config", "--zero-stage", "--no-pipeline-parallel"),
    *("--deepspeed-activation-checkpointing", "--train-tokens", "--lr-decay-tokens"),
    *("--embed-layernorm", "--cpu-optimizer", "--cpu_torch_adam", "--checkpoint-activations"),
    *("--tokenizer-name-or-path", "--skip-train-iteration-range", "--remote-device"),
)
"""Options that Megatron-DeepSpeed has, and Megatron-LM has not, or no longer."""


def megatron_data(draft: TranslationDraft) -> None:
    """Token files and how they are divided; `--eval-iters 0` holds nothing out for validation."""
    _order(draft)
    path = draft.only_one("--data-path", "--train-data-path")
    if path is None:
        draft.refuse("no token files are given", "--data-path", "add their prefix")
    else:
        draft.set("data.paths", _blend(draft, path), path)
    none = draft.get("--eval-iters") == 0
    if path == "--train-data-path":
        if draft.given("--split"):
            draft.refuse("separate token files are not split", "--split", "leave it out")
        if draft.given("--valid-data-path") and not none:
            draft.set("data.validation", _blend(draft, "--valid-data-path"), "--valid-data-path")
        else:
            draft.set("data.split", "1,0", "--valid-data-path", "--eval-iters")
        return
    if draft.given("--valid-data-path"):
        what = "validation files of their own need --train-data-path"
        draft.refuse(what, "--valid-data-path", "give it in place of --data-path")
    # Any characters between the numbers, as Megatron reads them.
    split = [*_NUMBER.findall(str(draft.get("--split"))), "0", "0"][:3]
    if none and split[1].strip("0."):
        try:
            # The same documents are trained on; nobody reads the others.
            unread = sum(map(float, split[1:]))
        except ValueError:
            draft.refuse("these are no proportions", "--split", "write three, such as 949,50,1")
            return
        split = [split[0], "0", f"{unread:g}"]
    draft.set("data.split", ",".join(split), "--split", *(["--eval-iters"] if none else []))


def _order(draft: TranslationDraft) -> None:
    """Whose order of samples."""
    marks = [draft.written(name) for name in _DEEPSPEED if draft.given(name)]
    marks += [word for word in draft.launcher if Path(word).name == "deepspeed"]
    if not marks:
        draft.fix("data.order", "megatron", "Megatron's order of samples")
        return
    draft.fix("data.order", "megatron-deepspeed", f"{marks[0]}: Megatron-DeepSpeed's order")
    text = (
        "this is Megatron-DeepSpeed, whose last epoch is shuffled by itself if less than 0.95 of "
        "it is needed; older versions, and Microsoft's, do as Megatron-LM: data.order=megatron"
    )
    draft.changed.append(Remark(marks[0], text))


def _blend(draft: TranslationDraft, name: str) -> Any:
    """One prefix, a list of prefixes, or prefixes with weights."""
    words: Sequence[str] = draft.get(name)
    if len(words) == 1:
        return words[0]
    try:
        weights = [float(word) for word in words[::2]] if len(words) % 2 == 0 else []
    except ValueError:
        weights = []
    if not weights:
        return list(words)
    blend: dict[str, float] = {}
    for prefix, weight in zip(words[1::2], weights, strict=True):
        if prefix in blend:
            draft.change(name, f"{prefix} is given twice; its weights are added")
        blend[prefix] = blend.get(prefix, 0.0) + weight
    return blend


def megatron_tokenizer(draft: TranslationDraft) -> None:
    """The tokenizer, which Megatron's token files do not name."""
    kind = draft.get("--tokenizer-type")
    files = ("--vocab-file", "--merge-file")
    model = draft.only_one("--tokenizer-model", "--tokenizer-name-or-path")
    paths = [Path(draft.get(name)) for name in files if draft.given(name)]
    where = [str(path.parent) for path in paths]
    if model is not None:
        draft.set("data.tokenizer", draft.get(model), model, "--tokenizer-type")
        draft.ignore_given(f"{model} names the tokenizer", *files)
    elif tuple(path.name for path in paths) in _FILES and where[0] == where[1]:
        draft.set("data.tokenizer", where[0], *files, "--tokenizer-type")
    elif len(paths) == 2:
        draft.set("data.tokenizer", str(paths[0]), files[0], "--tokenizer-type")
        draft.set("data.merges", str(paths[1]), files[1])
    elif where:
        name = next(name for name in files if draft.given(name))
        other = files[1 - files.index(name)]
        draft.refuse("is one of a tokenizer's two files", name, f"give {other} too")
        draft.account(*files, "--tokenizer-type")
    elif kind == "NullTokenizer":
        what = "a run needs the tokenizer of its token files"
        draft.refuse(what, "--tokenizer-type", "give --vocab-file and --merge-file")
    elif kind is not None:
        draft.ignore("--tokenizer-type", "the tokenizer is found beside the token files")


def megatron_validation(draft: TranslationDraft) -> None:
    """How often, and on how much."""
    batches, every = draft.get("--eval-iters"), draft.get("--eval-interval")
    others = ("--eval-interval", "--eval-global-batch-size")
    if batches == 0:
        draft.account("--eval-iters")
        draft.ignore_given("--eval-iters 0 validates nothing", *others)
        return
    held_out = _NUMBER.findall(str(draft.get("--split")))[1:2]
    if not draft.given("--train-data-path") and not "".join(held_out).strip(" 0."):
        draft.ignore_given("--split holds nothing out for validation", "--eval-iters", *others)
        return
    sizes = ("--eval-global-batch-size", "--global-batch-size", "--micro-batch-size")
    size = next((draft.get(name) for name in sizes if draft.given(name)), 1)
    if (levels := batch_levels(draft)) and not any(map(draft.given, sizes[:2])):
        size = levels[-1][1]
    draft.set("validate.every", f"{every} steps", "--eval-interval")
    draft.set("validate.windows", batches * size, "--eval-iters", "--eval-global-batch-size")
    if draft.given("--eval-iters"):
        text = "every validation reads the same samples; Megatron reads new ones each time"
        draft.change("--eval-iters", text)


def megatron_folder(draft: TranslationDraft) -> None:
    """Where the run lies, what it is called, and what it starts from."""
    save, load = draft.get("--save"), draft.get("--load")
    named = draft.get("--wandb-exp-name")
    base = named or Path(save or "").name or "megatron"
    draft.set("name", run_name(base, "megatron"), "--wandb-exp-name" if named else "--save")
    same = save is not None and load is not None and _same(save, load)
    if save is not None:
        draft.set("folder", save, "--save", *(["--load"] if same else []))
    else:
        text = "checkpoints are saved all the same, into the run's folder"
        draft.changed.append(Remark("without --save", text))
    if draft.given("--finetune") and load is not None and not same:
        draft.set("model.start", load, "--load", "--finetune")
    elif draft.given("--finetune"):
        what = "starts a new run from weights, which are not in a folder of their own"
        draft.refuse(what, "--finetune", "give --load the folder of the weights, --save another")
        draft.account("--load")
    elif load is not None and not same:
        draft.set("checkpoint.load", load, "--load")
        text = "once the run has saved a checkpoint itself, it resumes from that"
        draft.change("--load", text)
    elif save is not None and not same:
        text = "a run that this folder holds is resumed, also without --load"
        draft.change("--save", text)
    text = "a resumed run follows its present settings, and its log says which of them changed"
    draft.changed_once("--use-checkpoint-opt_param-scheduler", text)
    no_state = "--no-load-optim"
    if draft.given(no_state) and (load is None or draft.given("--finetune")):
        draft.ignore(no_state, "no optimizer state is loaded")
    elif draft.given(no_state):
        what = "the weights of a checkpoint go on with its optimizer state"
        draft.refuse(what, no_state, "give --finetune to start from weights alone")
    every = draft.get("--save-interval")
    retained = "--save-retain-interval"
    if every is not None:
        draft.set("checkpoint.every", f"{every} steps", "--save-interval")
        # Megatron deletes no checkpoint unless it is told to.
        name = retained if draft.given(retained) else "--save-interval"
        draft.set("checkpoint.keep_every", f"{draft.get(name)} steps", name)
    elif draft.given(retained):
        draft.set("checkpoint.keep_every", f"{draft.get(retained)} steps", retained)
    project, entity = draft.get("--wandb-project"), draft.get("--wandb-entity")
    if draft.given("--wandb-project") and project:
        draft.set("track.wandb.project", project, "--wandb-project")
    if entity and project:
        draft.set("track.wandb.entity", entity, "--wandb-entity")
    elif draft.given("--wandb-entity"):
        draft.ignore("--wandb-entity", "only --wandb-project uses it")


def megatron_prepared_tokenizer(draft: TranslationDraft) -> None:
    """The tokenizer of preprocess_data.py."""
    kind = draft.get("--tokenizer-type")
    model = draft.only_one("--tokenizer-model", "--tokenizer-name-or-path")
    files = ("--vocab-file", "--merge-file")
    if kind is None or kind in _BY_NAME:
        if model is None and kind is not None:
            draft.refuse("the tokenizer is not named", "--tokenizer-type", "give --tokenizer-model")
        elif model is not None:
            draft.set("--tokenizer", draft.get(model), model, "--tokenizer-type")
    elif kind == "GPT2BPETokenizer":
        if model is not None:
            draft.refuse(
                "GPT-2's tokenizer has two files", model, "give --vocab-file, --merge-file"
            )
        elif not any(map(draft.given, files)):
            draft.set("--tokenizer", "gpt2", "--tokenizer-type")
    else:
        what = "only tokenizers of GPT models are known"
        draft.refuse(what, "--tokenizer-type", "give GPT2BPETokenizer or HuggingFaceTokenizer")
    for name in filter(draft.given, files):
        if kind == "GPT2BPETokenizer" or model is None:
            draft.set(name, draft.get(name), name, "--tokenizer-type")
        else:
            draft.ignore(name, f"{model} names the tokenizer")
    ends = "--append-eod" if draft.given("--append-eod") else "--no-append-eod"
    draft.set(ends, True, "--append-eod")


def _same(path: str, other: str) -> bool:
    return os.path.normpath(path) == os.path.normpath(other)


RULES = (
    megatron_data,
    megatron_tokenizer,
    megatron_validation,
    megatron_folder,
    megatron_prepared_tokenizer,
)
