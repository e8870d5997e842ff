"""Names of nanoGPT's train.py that mean something only together, and its scripts for data."""

from __future__ import annotations

from pathlib import Path

from gristmill.dialects.draft import Remark, TranslationDraft, run_name
from gristmill.dialects.words import names_script

_OPENWEBTEXT = "data/openwebtext/prepare.py"
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def model(draft: TranslationDraft) -> None:
    """Sizes, which pretrained weights bring along."""
    start = draft.get("init_from")
    sizes = {"n_layer": "layers", "n_head": "heads", "n_embd": "width", "bias": "bias"}
    if isinstance(start, str) and start.startswith("gpt2"):
        draft.set("model.start", start, "init_from")
        draft.take("data.sequence", "block_size")
        draft.ignore_given(f"init_from = {start!r} brings its own", *sizes)
        return
    if start == "resume":
        draft.ignore("init_from", "a run that the folder holds is resumed in any case")
    elif start != "scratch":
        what = "is neither scratch, resume nor one of the gpt2 models"
        draft.refuse(what, "init_from", 'give "scratch", "resume", "gpt2" … "gpt2-xl"')
    elif draft.given("init_from"):
        draft.ignore("init_from", "weights are random in any case")
    for name, setting in sizes.items():
        draft.take(f"model.{setting}", name)
    draft.take("model.context", "block_size")
    # nanoGPT's GELU is the exact one, which pretrained GPT-2 weights were not made with.
    draft.fix("model.activation", "gelu", "nanoGPT's GELU is the exact one")


def batch(draft: TranslationDraft) -> None:
    """The accumulation of all processes together, as nanoGPT counts it."""
    micro, times = draft.get("batch_size"), draft.get("gradient_accumulation_steps")
    draft.set("train.batch", micro * times, "batch_size", "gradient_accumulation_steps")
    draft.set("train.micro_batch", micro, "batch_size")
    for setting in ("windows", "train_windows"):
        windows = draft.get("eval_iters") * micro
        draft.set(f"validate.{setting}", windows, "eval_iters", "batch_size")
    draft.set("validate.every", f"{draft.get('eval_interval')} steps", "eval_interval")
    draft.set("checkpoint.every", f"{draft.get('eval_interval')} steps", "eval_interval")


def schedule(draft: TranslationDraft) -> None:
    """Cosine with warm-up, or a constant rate without one."""
    if not draft.get("decay_lr"):
        draft.set("schedule.type", "constant", "decay_lr")
        draft.set("schedule.warmup", "0 steps", "decay_lr")
        draft.ignore_given(
            "decay_lr = False keeps the rate constant from the first step on",
            "warmup_iters",
            "lr_decay_iters",
            "min_lr",
        )
        return
    draft.set("schedule.type", "cosine", "decay_lr")
    draft.set("schedule.warmup", f"{draft.get('warmup_iters')} steps", "warmup_iters")
    draft.set("schedule.decay", f"{draft.get('lr_decay_iters')} steps", "lr_decay_iters")
    draft.take("schedule.min_lr", "min_lr")


def precision(draft: TranslationDraft) -> None:
    """Device and number format; on the CPU nanoGPT computes in float32 whatever dtype says."""
    device, written = draft.get("device"), draft.get("dtype")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        draft.refuse("is no device known here", "device", "give cpu, cuda or mps")
        return
    draft.set("runtime.device", kind, "device")
    if kind == "cpu":
        draft.set("precision.compute", "fp32", "device")
        draft.ignore_given("on the CPU nanoGPT computes in float32 in any case", "dtype")
    elif written not in _FORMATS:
        draft.refuse("is no number format", "dtype", f"one of {', '.join(_FORMATS)}")
    else:
        draft.set_compute(_FORMATS[written], "dtype")


def folder(draft: TranslationDraft) -> None:
    """Where the run lies and where its tokens are."""
    out, named = draft.get("out_dir"), draft.get("wandb_run_name")
    draft.set("folder", out, "out_dir")
    start = draft.get("init_from")
    if draft.get("eval_only") and isinstance(start, str) and start.startswith("gpt2"):
        # Not the run that out_dir may hold: pretrained weights are evaluated as they are.
        draft.set("folder", f"{out}/{start}", "out_dir", "init_from", "eval_only")
    logs, own = draft.get("wandb_log"), Path(out).name
    if logs:
        draft.set("name", run_name(named, "nanogpt"), "wandb_run_name")
        draft.set("track.wandb.project", draft.get("wandb_project"), "wandb_project", "wandb_log")
    else:
        draft.set("name", run_name(own, "nanogpt"), "out_dir")
        draft.ignore_given(
            "without wandb_log nothing is sent", "wandb_log", "wandb_project", "wandb_run_name"
        )
    if draft.get("init_from") == "scratch" and draft.given("out_dir"):
        draft.change("out_dir", "a run that this folder holds is resumed, not begun anew")
    for setting, part in (("paths", "train"), ("validation", "val")):
        draft.set(f"data.{setting}", f"data/{draft.get('dataset')}/{part}", "dataset")


def corpus(draft: TranslationDraft) -> None:
    """What each of the three scripts prepares, into files beside it."""
    script = draft.script or draft.dialect.program
    place, because = str(Path(script).parent), f"as {script} does"
    draft.fix("--output", f"{place}/{{split}}", f"train.bin and val.bin in {place}")
    if names_script(script, _OPENWEBTEXT):
        draft.fix("SOURCE", "openwebtext", "the corpus, with the documents that nanoGPT holds out")
        return
    own = Path(place, "input.txt")
    if own.is_file():
        draft.fix("SOURCE", str(own), "the file that the script reads if it is there")
    else:
        draft.fix("SOURCE", "tinyshakespeare", "the file that the script downloads")
    characters = names_script(script, "shakespeare_char/prepare.py")
    draft.fix("--tokenizer", "characters" if characters else "gpt2", because)
    draft.fix("--hold-out-end", 0.1, because)
    draft.fix("--no-append-eod", True, because)
    if characters:
        text = "two ids more than in meta.pkl, for other characters and the end of a text"
        draft.changed.append(Remark("the tokenizer", text))


RULES = (model, batch, schedule, precision, folder, corpus)
