"""Options that mean something only together, of programs that train GPT-2: nanoGPT, decentralized
GPT-2 and pre-training-gpt2."""

from __future__ import annotations

import os
from pathlib import Path

from gristmill.dialects.draft import Remark, TranslationDraft, run_name
from gristmill.dialects.words import names_script

_OPENWEBTEXT = "data/openwebtext/prepare.py"
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DEVICES = {"TPU": "xla", "CUDA": "cuda", "GPU": "cuda", "CPU": "cpu"}
"""Our device for that of PJRT_DEVICE."""
_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu"}
_PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


# ------------------------------------------------------------------ nanoGPT


def nanogpt_model(draft: TranslationDraft) -> None:
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


def nanogpt_batch(draft: TranslationDraft) -> None:
    """The accumulation of all processes together, as nanoGPT counts it."""
    micro, times = draft.get("batch_size"), draft.get("gradient_accumulation_steps")
    draft.set("train.batch", micro * times, "batch_size", "gradient_accumulation_steps")
    draft.set("train.micro_batch", micro, "batch_size")
    for setting in ("windows", "train_windows"):
        windows = draft.get("eval_iters") * micro
        draft.set(f"validate.{setting}", windows, "eval_iters", "batch_size")
    draft.set("validate.every", f"{draft.get('eval_interval')} steps", "eval_interval")
    draft.set("checkpoint.every", f"{draft.get('eval_interval')} steps", "eval_interval")


def nanogpt_schedule(draft: TranslationDraft) -> None:
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


def nanogpt_precision(draft: TranslationDraft) -> None:
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


def nanogpt_folder(draft: TranslationDraft) -> None:
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


def nanogpt_corpus(draft: TranslationDraft) -> None:
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


# ------------------------------------------------------------------ decentralized GPT-2


def decentralized_optimizer(draft: TranslationDraft) -> None:
    """AdamW, or AccumAdamW with its number of steps."""
    kind = draft.choice("train.optim.name")
    accumulates = kind == "accum-adamw"
    draft.set("optim.type", kind, "train.optim.name")
    betas = draft.get("train.optim.betas") or ([0.9, 0.98] if accumulates else [0.9, 0.95])
    for number, beta in enumerate(betas, 1):
        draft.set(f"optim.beta{number}", beta, "train.optim.betas")
    if accumulates:
        draft.take("optim.accum", "train.optim.accum_steps")
    elif draft.given("train.optim.accum_steps"):
        draft.refuse("only accumadamw has it", "train.optim.accum_steps", "leave it out")


def decentralized_exchange(draft: TranslationDraft) -> None:
    """Gossip, or gradients summed over all processes."""
    if draft.get("train.backend") == "decentdp":
        topology = draft.choice("train.topology")
        draft.set("parallel.gossip.topology", topology, "train.topology", "train.backend")
        # As in decent-dp 0.1.2, with which the published runs were made.
        draft.set("parallel.exchange.average", "keep", "train.backend")
        if draft.given("train.grad_norm_clip"):
            text = "the norm is that of the whole gradient, not of each bucket"
            draft.change("train.grad_norm_clip", text)
    elif draft.given("train.backend") and draft.get("train.backend") == "pytorchddp":
        draft.ignore("train.backend", "gradients are summed over all processes in any case")
    if draft.get("train.backend") != "decentdp" and draft.given("train.topology"):
        draft.ignore("train.topology", "only the backend decentdp has one")
    if draft.get("train.backend") not in ("decentdp", "pytorchddp"):
        draft.refuse("is no backend", "train.backend", "give decentdp or pytorchddp")


def decentralized_folder(draft: TranslationDraft) -> None:
    """Where the run lies, where its tokens are, and how often it validates and saves."""
    log, data = draft.get("log_dir"), draft.get("data_dir")
    # Theirs is named for the job, of which there is a new one at every start.
    own = run_name(Path(draft.words[-1]).stem, "decentralized")
    draft.set("name", own, "log_dir")
    draft.set("folder", os.path.join(log, own), "log_dir")
    draft.changed_once("log_dir", "the run's folder in it is named for the file, not for the job")
    for setting, part in (("paths", "train"), ("validation", "val")):
        draft.set(f"data.{setting}", os.path.join(data, part), "data_dir")
    every = f"{draft.get('log.eval_interval')} steps"
    windows = draft.get("log.eval_steps") * draft.get("train.global_batch_size")
    draft.set("validate.every", every, "log.eval_interval")
    for setting in ("windows", "train_windows"):
        names = ("log.eval_steps", "train.global_batch_size")
        draft.set(f"validate.{setting}", windows, *names)
    draft.set("checkpoint.every", every, "log.eval_interval")
    if draft.get("log.wandb_log"):
        names = ("log.wandb_project", "log.wandb_log")
        draft.set("track.wandb.project", draft.get("log.wandb_project"), *names)
    else:
        draft.ignore_given(
            "without wandb_log nothing is sent", "log.wandb_log", "log.wandb_project"
        )


def decentralized_precision(draft: TranslationDraft) -> None:
    """Mixed precision is fp16, with torch's GradScaler."""
    draft.set_compute("fp16" if draft.get("train.amp") else "fp32", "train.amp")


# ------------------------------------------------------------------ pre-training-gpt2


def xla_gpt2_model(draft: TranslationDraft) -> None:
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


def xla_gpt2_batch(draft: TranslationDraft) -> None:
    """The batch of a micro-step over all processes, and how many there are in a step."""
    micro, times = draft.get("--train-batch-size"), draft.get("--gradient-accum-step")
    draft.set("train.batch", micro * times, "--train-batch-size", "--gradient-accum-step")
    draft.set("train.accumulate", times, "--gradient-accum-step")
    windows = draft.get("--valid-steps") * draft.get("--eval-batch-size")
    draft.set("validate.windows", windows, "--valid-steps", "--eval-batch-size")


def xla_gpt2_optimizer(draft: TranslationDraft) -> None:
    """AdamW, or Adam, whose weight decay is L2."""
    decay, kind = draft.get("--weight-decay"), draft.get("--optim-type")
    if kind not in ("adamw", "adam"):
        draft.refuse("is no optimizer of the program", "--optim-type", "give adamw or adam")
    # Without weight decay both are the same.
    draft.set("optim.type", kind if decay else "adamw", "--optim-type")
    draft.set("optim.weight_decay", decay, "--weight-decay")
    for number, beta in enumerate(draft.get("--betas"), 1):
        draft.set(f"optim.beta{number}", beta, "--betas")


def xla_gpt2_schedule(draft: TranslationDraft) -> None:
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


def xla_gpt2_precision(draft: TranslationDraft) -> None:
    """Number format, with torch's GradScaler for fp16."""
    kind, products = draft.get("--mixed-precision"), draft.get("--matmul-precision")
    if products not in ("highest", "high", "medium"):
        what = "is no precision of torch"
        draft.refuse(what, "--matmul-precision", "one of highest, high, medium")
    if kind is None:
        draft.set_compute("fp32", "--mixed-precision")
        draft.set("precision.tf32", products != "highest", "--matmul-precision")
        return
    if kind not in ("fp16", "bf16"):
        draft.refuse("is no number format", "--mixed-precision", "give fp16 or bf16")
    draft.set_compute(kind, "--mixed-precision")
    text = f"products are in {kind}; those that are not do not depend on it"
    draft.ignore_given(text, "--matmul-precision")


def xla_gpt2_device(draft: TranslationDraft) -> None:
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


def xla_gpt2_folder(draft: TranslationDraft) -> None:
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


def xla_gpt2_corpus(draft: TranslationDraft) -> None:
    """FineWeb or FineWeb-Edu, into shards by the names that training is given."""
    name = "fineweb-edu" if draft.given("--fineweb-edu") else "fineweb"
    draft.set("SOURCE", f"{name}-10bt", "--fineweb-edu")
    where = draft.get("--output-dir")
    draft.set("--output", f"{where.rstrip('/')}/{{split}}", "--output-dir")
    text = "shards are named train_000001.npy, … and test_000001.npy, … in it"
    draft.changed_once("--output-dir", text)


RULES = (
    nanogpt_model,
    nanogpt_batch,
    nanogpt_schedule,
    nanogpt_precision,
    nanogpt_folder,
    nanogpt_corpus,
    decentralized_optimizer,
    decentralized_exchange,
    decentralized_folder,
    decentralized_precision,
    xla_gpt2_model,
    xla_gpt2_batch,
    xla_gpt2_optimizer,
    xla_gpt2_schedule,
    xla_gpt2_precision,
    xla_gpt2_device,
    xla_gpt2_folder,
    xla_gpt2_corpus,
)
