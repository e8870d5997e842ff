"""Options of pre-training-gpt2 that mean something only together."""

from __future__ import annotations

from pathlib import Path

from gristmill.dialects.draft import TranslationDraft, run_name

_DEVICES = {"TPU": "xla", "CUDA": "cuda", "GPU": "cuda", "CPU": "cpu"}
"""Our device for that of PJRT_DEVICE."""
_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu"}
_PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def model(draft: TranslationDraft) -> None:
    """Sizes, which OpenAI's weights bring along."""
    sizes = {
        "--d-model": "width",
        "--num-layers": "layers",
        "--num-heads": "heads",
        "--d-ff": "mlp_width",
        "--vocab-size": "vocab",
    }
    start, length = draft.get("--from-checkpoint"), draft.get("--seq-length")
    tied = draft.given("--tie-weights")
    if start in _PRETRAINED:
        draft.set("model.start", start, "--from-checkpoint")
        draft.set("data.sequence", length, "--seq-length")
        draft.ignore_given(
            f"--from-checkpoint {start} brings its own", *sizes, "--tie-weights", "--activation"
        )
        if draft.given("--from-checkpoint"):
            text = "is evaluated as published, with LayerNorm's eps 1e-5 instead of 1e-7"
            draft.change("--from-checkpoint", text)
        return
    if start is not None:
        what = "checkpoints of other programs are not resumed from"
        draft.refuse(what, "--from-checkpoint", "leave it out: the same command resumes")
    for name, setting in sizes.items():
        draft.take(f"model.{setting}", name)
    draft.set("model.context", length, "--seq-length")
    draft.set("model.tie_head", tied, "--tie-weights")
    if draft.get("--activation") not in _ACTIVATIONS:
        draft.refuse("is no activation of the program", "--activation", "give gelu or relu")
    else:
        draft.set("model.activation", _ACTIVATIONS[draft.get("--activation")], "--activation")
    # Its own LayerNorm has this one.
    draft.set("model.norm_eps", 1e-7, "--d-model")


def batch(draft: TranslationDraft) -> None:
    """The batch of a micro-step over all processes, and how many there are in a step."""
    micro, times = draft.get("--train-batch-size"), draft.get("--gradient-accum-step")
    draft.set("train.batch", micro * times, "--train-batch-size", "--gradient-accum-step")
    draft.set("train.accumulate", times, "--gradient-accum-step")
    windows = draft.get("--valid-steps") * draft.get("--eval-batch-size")
    draft.set("validate.windows", windows, "--valid-steps", "--eval-batch-size")


def optimizer(draft: TranslationDraft) -> None:
    """AdamW, or Adam, whose weight decay is L2."""
    decay, kind = draft.get("--weight-decay"), draft.get("--optim-type")
    if kind not in ("adamw", "adam"):
        draft.refuse("is no optimizer of the program", "--optim-type", "give adamw or adam")
    # Without weight decay both are the same.
    draft.set("optim.type", kind if decay else "adamw", "--optim-type")
    draft.set("optim.weight_decay", decay, "--weight-decay")
    for number, beta in enumerate(draft.get("--betas"), 1):
        draft.set(f"optim.beta{number}", beta, "--betas")


def schedule(draft: TranslationDraft) -> None:
    """Cosine, or "noam", whose rate also depends on the width."""
    kind, warmup = draft.get("--decay-method"), draft.get("--warmup-steps")
    rate = draft.get("--learning-rate")
    draft.set("schedule.warmup", f"{warmup} steps", "--warmup-steps")
    if kind == "cosine":
        draft.set("optim.lr", rate, "--learning-rate")
        draft.set("schedule.type", "cosine", "--decay-method")
        draft.set("schedule.decay", f"{draft.get('--decay-steps')} steps", "--decay-steps")
        draft.take("schedule.min_lr", "--min-lr")
        return
    draft.ignore_given("only --decay-method cosine uses it", "--decay-steps", "--min-lr")
    if kind != "noam" or warmup < 1 or draft.get("--d-model") < 1:
        what = "is neither cosine nor noam with a warm-up"
        draft.refuse(what, "--decay-method", "give cosine, or noam with --warmup-steps")
        draft.account("--learning-rate")
        return
    draft.set("schedule.type", "inverse-sqrt", "--decay-method")
    peak = rate * (draft.get("--d-model") * warmup) ** -0.5
    names = ("--learning-rate", "--decay-method", "--d-model", "--warmup-steps")
    draft.set("optim.lr", peak, *names)


def precision(draft: TranslationDraft) -> None:
    """Number format, with torch's GradScaler for fp16."""
    kind, products = draft.get("--mixed-precision"), draft.get("--matmul-precision")
    if products not in ("highest", "high", "medium"):
        what = "is no precision of torch"
        draft.refuse(what, "--matmul-precision", "one of highest, high, medium")
    if kind is None:
        draft.set("precision.tf32", products != "highest", "--matmul-precision")
        return
    if kind not in ("fp16", "bf16"):
        draft.refuse("is no number format", "--mixed-precision", "give fp16 or bf16")
    draft.set_compute(kind, "--mixed-precision")
    text = f"products are in {kind}; those that are not do not depend on it"
    draft.ignore_given(text, "--matmul-precision")


def device(draft: TranslationDraft) -> None:
    """`run_pretrain_xla.py` trains with XLA, on the device that PJRT_DEVICE names."""
    xla, kind = draft.runs("run_pretrain_xla.py"), draft.get("PJRT_DEVICE")
    if not xla:
        draft.ignore_given("only run_pretrain_xla.py reads it", "PJRT_DEVICE", "GPU_NUM_DEVICES")
    elif kind not in _DEVICES:
        what = "is no device that is known here"
        draft.refuse(what, "PJRT_DEVICE", f"one of {', '.join(_DEVICES)}")
    else:
        draft.set("runtime.device", _DEVICES[kind], "PJRT_DEVICE")
        if kind == "TPU":
            text = "all devices that JAX finds are used; JAX_PLATFORMS=tpu allows no others"
            draft.changed_once("PJRT_DEVICE", text)
        elif _DEVICES[kind] == "cuda":
            text = "trains with PyTorch on CUDA, to the same result; runtime.device=xla uses XLA"
            draft.change("PJRT_DEVICE", text)
        if draft.given("GPU_NUM_DEVICES"):
            text = f"as many processes are started with --processes {draft.get('GPU_NUM_DEVICES')}"
            draft.change("GPU_NUM_DEVICES", text)
    if not xla or _DEVICES.get(kind) != "xla":
        draft.take("runtime.compile", "--compile")
    elif draft.given("--compile"):
        draft.ignore("--compile", "XLA compiles the whole step in any case")


def folder(draft: TranslationDraft) -> None:
    """Where the run lies, what it is called, and how many checkpoints it keeps."""
    path, named = draft.get("--checkpoints-dir"), draft.get("--wandb-name")
    draft.set("folder", path, "--checkpoints-dir")
    if draft.given("--wandb-logging"):
        names = ("--wandb-project", "--wandb-logging")
        draft.set("track.wandb.project", draft.get(names[0]), *names)
        draft.set("name", run_name(named, "xla-gpt2"), "--wandb-name")
    else:
        own = Path(path).name
        draft.set("name", run_name(own, "xla-gpt2"), "--checkpoints-dir")
        draft.ignore_given(
            "without --wandb-logging nothing is sent", "--wandb-project", "--wandb-name"
        )
    limit = draft.get("--saved-checkpoint-limit")
    draft.set("checkpoint.keep", max(2, limit), "--saved-checkpoint-limit")
    if limit < 2:
        draft.change("--saved-checkpoint-limit", "two are kept, in case that one is damaged")


def corpus(draft: TranslationDraft) -> None:
    """FineWeb or FineWeb-Edu, into shards by the names that training is given."""
    name = "fineweb-edu" if draft.given("--fineweb-edu") else "fineweb"
    draft.set("SOURCE", f"{name}-10bt", "--fineweb-edu")
    where = draft.get("--output-dir")
    draft.set("--output", f"{where.rstrip('/')}/{{split}}", "--output-dir")
    text = "shards are named train_000001.npy, … and test_000001.npy, … in it"
    draft.changed_once("--output-dir", text)


RULES = (model, batch, optimizer, schedule, precision, device, folder, corpus)
