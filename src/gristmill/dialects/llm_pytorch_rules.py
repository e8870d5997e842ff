"""Options of llm-pytorch's GPT trainer that mean something only together."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from gristmill.dialects.draft import Preparation, Remark, TranslationDraft, run_name

_SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear"},
    "cosine": {"type": "cosine"},
    "cosine_with_restarts": {"type": "cosine-restarts", "cycles": 1},
    "polynomial": {"type": "polynomial", "power": 1.0, "min_lr": 1e-7},
    "constant": {"type": "constant"},
    "constant_with_warmup": {"type": "constant"},
}
"""The schedules of transformers, with the defaults that the trainer leaves them."""
_TEXT_FILES = ("csv", "json", "txt")


def llm_pytorch_model(draft: TranslationDraft) -> None:
    """An architecture of Hugging Face, with its weights if they are named."""
    names = ("--model_name_or_path", "--config_name", "--model_type")
    named, shape, kind = (draft.get(name) for name in names)
    if named is None and shape is None and kind is None:
        draft.refuse("the model is not named", names[0], "add it")
    elif kind is not None and named is None and shape is None:
        draft.set("model.hf_config", {"model_type": kind}, names[2])
    elif named is not None and shape is not None and named != shape:
        what = "the weights of one model do not fit the configuration of another"
        draft.refuse(what, names[1], "give one of the two")
    else:
        draft.set("model.hf", named or shape, *names[:2])
        if named is not None:
            draft.set("model.init", "pretrained", names[0])
            text = "starts from its weights, as in the trainer; model.init=random does not"
            draft.change(names[0], text)
    if kind is not None and (named or shape):
        draft.ignore(names[2], "the name of the model says it")
    draft.take("data.sequence", "--block_size")


def llm_pytorch_batch(draft: TranslationDraft) -> None:
    """The micro-batch of each process, its accumulation, and the length of the run."""
    draft.take("train.micro_batch", "--per_device_train_batch_size")
    draft.take("train.accumulate", "--gradient_accumulation_steps")
    steps = draft.get("--max_train_steps")
    if steps is None:
        what = "a run is counted in steps, not in epochs, whose length only the tokens tell"
        name = "--num_train_epochs" if draft.given("--num_train_epochs") else "--max_train_steps"
        draft.refuse(what, name, "give --max_train_steps")
        return
    draft.set("train.until", f"{steps} steps", "--max_train_steps")
    draft.ignore_given("--max_train_steps counts", "--num_train_epochs")


def llm_pytorch_schedule(draft: TranslationDraft) -> None:
    """One of transformers' schedules, over the run."""
    kind = draft.get("--lr_scheduler_type")
    if kind not in _SCHEDULES:
        known = ", ".join(_SCHEDULES)
        draft.refuse("is no schedule of the trainer", "--lr_scheduler_type", f"one of {known}")
        draft.account("--num_warmup_steps")
        return
    draft.set_table("schedule", _SCHEDULES[kind], "--lr_scheduler_type")
    warmup = draft.get("--num_warmup_steps")
    if kind == "constant" and draft.given("--num_warmup_steps"):
        draft.ignore("--num_warmup_steps", "constant has no warm-up; constant_with_warmup has")
        warmup = 0
    draft.set("schedule.warmup", f"{warmup} steps", "--num_warmup_steps")


def llm_pytorch_precision(draft: TranslationDraft) -> None:
    """Number format, with torch's GradScaler for fp16."""
    kind = draft.get("--mixed_precision")
    if kind == "fp8":
        draft.set_compute("bf16", "--mixed_precision")
        draft.set("precision.fp8", ["mlp", "attention"], "--mixed_precision")
        note = "linear layers of blocks are in fp8, by rules of our own; the head stays in bf16"
        draft.change("--mixed_precision", note)
    elif kind not in ("no", "fp16", "bf16"):
        draft.refuse("is no number format", "--mixed_precision", "one of no, fp8, fp16, bf16")
    elif kind == "no":
        draft.set_compute("fp32", "--mixed_precision")
        draft.set("precision.tf32", False, "--mixed_precision")
    else:
        draft.set_compute(kind, "--mixed_precision")


def llm_pytorch_kfac(draft: TranslationDraft) -> None:
    """The preconditioner, with the method of kfac-pytorch."""
    settings = {
        "--kfac-factor-update-steps": "factor_every",
        "--kfac-inv-update-steps": "inverse_every",
        "--kfac-damping": "damping",
        "--kfac-factor-decay": "decay",
        "--kfac-kl-clip": "kl_clip",
    }
    if not draft.given("--kfac"):
        draft.ignore_given("only --kfac uses it", *settings)
        return
    table = "optim.preconditioner"
    fixed = {"type": "kfac", "method": "eigen", "relative_damping": False}
    draft.set_table(table, fixed, "--kfac")
    for name, key in settings.items():
        if draft.get(name) is None:
            draft.refuse("--kfac needs it, as in the trainer", name, "add it")
        else:
            draft.take(f"{table}.{key}", name)
    text = "steps once for each full batch, on unscaled gradients averaged over all processes"
    draft.change("--kfac", text)


def llm_pytorch_folder(draft: TranslationDraft) -> None:
    """Where the run lies and how often it saves."""
    output = draft.get("--output_dir")
    if output is None:
        draft.refuse("the folder of the run is not given", "--output_dir", "add it")
    else:
        own = Path(output).name
        draft.set("name", run_name(own, "llm-pytorch"), "--output_dir")
        draft.set("folder", output, "--output_dir")
    every = draft.get("--checkpointing_steps")
    if every is None:
        return
    if not every.isdecimal():
        what = "checkpoints are counted in steps; the trainer saves none for this value"
        draft.refuse(what, "--checkpointing_steps", "give a number of steps")
        return
    # The trainer deletes no checkpoint.
    for setting in ("every", "keep_every"):
        draft.set(f"checkpoint.{setting}", f"{int(every)} steps", "--checkpointing_steps")


def llm_pytorch_data(draft: TranslationDraft) -> None:
    """Token files, made from a dataset or from files by a command that has to be run before."""
    tokenizer = next(
        (draft.get(name) for name in _TOKENIZERS if draft.get(name) is not None), "gpt2"
    )
    dataset, files = draft.get("--dataset_name"), draft.get("--train_file")
    if (dataset is None) == (files is None):
        what = "gives the text, and so does --train_file" if dataset else "no text is given"
        draft.refuse(what, "--dataset_name", "give --dataset_name or --train_file")
        draft.account("--train_file", "--validation_file", "--dataset_config_name")
        return
    options = ["--no-append-eod", f"--tokenizer={tokenizer}"]
    if draft.given("--preprocessing_num_workers"):
        options.append(f"--workers={draft.get('--preprocessing_num_workers')}")
    if dataset is not None:
        _from_dataset(draft, dataset, tokenizer, options)
    else:
        _from_files(draft, files, tokenizer, options)


_CORPORA = {
    ("wikitext", "wikitext-2-raw-v1"): "wikitext-2",
    ("wikitext", "wikitext-103-raw-v1"): "wikitext-103",
}
"""Datasets with a validation set of their own that `prepare` knows by name."""
_MAKING = ("--tokenizer_name", "--preprocessing_num_workers")
"""Options about how tokens are made."""
_TOKENIZERS = ("--tokenizer_name", "--model_name_or_path", "--config_name")


def _from_dataset(
    draft: TranslationDraft, dataset: str, tokenizer: str, options: list[str]
) -> None:
    part = draft.get("--dataset_config_name")
    query = f"?config={quote_plus(part)}" if part else ""
    names = ("--dataset_name", "--dataset_config_name", *_MAKING)
    prefix = _prefix("-".join(filter(None, (dataset, part))), tokenizer)
    draft.ignore_given("--dataset_name brings its own validation set", "--validation_file")
    if (corpus := _CORPORA.get((dataset.rpartition("/")[2], part))) is not None:
        words = ("prepare", corpus, f"--output={prefix}", *options)
        draft.first.append(Preparation(words, (f"{prefix}_train", f"{prefix}_val")))
        draft.set("data.paths", f"{prefix}_train", *names)
        draft.set("data.validation", f"{prefix}_val", *names)
        why = "the dataset has a validation set of its own"
        draft.ignore_given(why, "--validation_split_percentage")
        return
    local = dataset if dataset.startswith((".", "/")) or not Path(dataset).exists() else None
    source = f"hf:{local or f'./{dataset}'}{query}"
    _hold_out(draft, prefix, source, options, *names)


def _from_files(draft: TranslationDraft, file: str, tokenizer: str, options: list[str]) -> None:
    for name in filter(draft.given, ("--train_file", "--validation_file")):
        ending = draft.get(name).rpartition(".")[2]
        if ending not in _TEXT_FILES:
            known = ", ".join(_TEXT_FILES)
            draft.refuse(f"the ending {ending!r} is not one of {known}", name, "rename the file")
    draft.ignore_given("files have no configuration", "--dataset_config_name")
    # A line of a text file is a document, as in the datasets library.
    lines = ["--documents=line"] if file.endswith(".txt") else []
    stem = Path(file).stem
    prefix = _prefix(stem, tokenizer)
    own = draft.get("--validation_file")
    if own is None:
        _hold_out(draft, prefix, file, [*options, *lines], "--train_file", *_MAKING)
        return
    for setting, part, source, name in (
        ("paths", "train", file, "--train_file"),
        ("validation", "val", own, "--validation_file"),
    ):
        each = ["--documents=line"] if source.endswith(".txt") else []
        words = ("prepare", source, f"--output={prefix}_{part}", *options, *each)
        draft.first.append(Preparation(words, (f"{prefix}_{part}",)))
        draft.set(f"data.{setting}", f"{prefix}_{part}", name, *_MAKING)
    why = "--validation_file is the validation set"
    draft.ignore_given(why, "--validation_split_percentage")


def _hold_out(
    draft: TranslationDraft, prefix: str, source: str, options: list[str], *names: str
) -> None:
    """Prepare one text, of which documents are held out for validation."""
    percent = draft.get("--validation_split_percentage")
    percentage = "--validation_split_percentage"
    if not 0 < percent < 100:
        draft.refuse("must be above 0 and below 100", percentage, "give 5, for example")
        return
    split = f"--split={100 - percent},{percent}"
    words = ("prepare", source, f"--output={prefix}", split, *options)
    draft.first.append(Preparation(words, (f"{prefix}_train", f"{prefix}_val")))
    draft.set("data.paths", f"{prefix}_train", *names)
    draft.set("data.validation", f"{prefix}_val", *names, percentage)
    text = "documents are drawn at random, also where a dataset has a validation set of its own"
    draft.changed.append(Remark(draft.written(percentage), text))


def _prefix(text: str, tokenizer: str) -> str:
    """Where the tokens of a text lie; a path names the tokenizer by its last part."""
    return f"tokens/{run_name(text, 'text')}-{run_name(Path(tokenizer).name, 'tokenizer')}"


RULES = (
    llm_pytorch_model,
    llm_pytorch_batch,
    llm_pytorch_schedule,
    llm_pytorch_precision,
    llm_pytorch_kfac,
    llm_pytorch_folder,
    llm_pytorch_data,
)
