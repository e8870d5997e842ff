"""Options of Megatron-LM and Megatron-DeepSpeed that mean something only together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gristmill.dialects.draft import Draft, Remark
from gristmill.dialects.naming import run_name

_UNITS = {"iters": "steps", "samples": "samples", "tokens": "tokens"}
_BY_NAME = (
    *("HuggingFaceTokenizer", "PretrainedFromHF", "Llama2Tokenizer"),
    *("SentencePieceTokenizer", "GPTSentencePieceTokenizer"),
)
"""Tokenizers that have one file, or a name."""
_NEVER = 2**31 - 1
"""A window that no run is as long as."""


def horizon(draft: Draft) -> None:
    """The length of the run, in one of three units."""
    name = draft.only_one("--train-iters", "--train-samples", "--train-tokens")
    if name is None:
        draft.refuse("the length of the run is not given", "--train-iters", "add it")
        return
    draft.set("train.until", f"{draft.get(name)} {_unit(name)}", name)


def batch(draft: Draft) -> None:
    """Global batch, micro-batch, and the batch ramp."""
    whole, ramp = draft.get("--global-batch-size"), draft.get("--rampup-batch-size")
    if draft.given("--micro-batch-size"):
        draft.set("train.micro_batch", draft.get("--micro-batch-size"), "--micro-batch-size")
    if whole is not None:
        draft.set("train.batch", whole, "--global-batch-size")
    else:
        # One micro-batch of each data-parallel process.
        draft.set("train.accumulate", 1, "--global-batch-size")
    if ramp is None:
        return
    if not draft.given("--train-samples"):
        what = "a ramp is counted in samples, and the run is not"
        draft.refuse(what, "--rampup-batch-size", "give --train-samples, as Megatron wants it too")
        return
    start, by, over = ramp
    for key, value in (("start", start), ("by", by), ("over", f"{over} samples")):
        draft.set(f"train.ramp.{key}", value, "--rampup-batch-size")


def learning_rate(draft: Draft) -> None:
    """Warm-up and decay, each in iterations, samples or a fraction of the decay."""
    kind = draft.choice("--lr-decay-style")
    decays = [f"--lr-decay-{unit}" for unit in _UNITS]
    decay = draft.only_one(*decays)
    warmup = draft.only_one("--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples")
    run = next((f"--train-{unit}" for unit in _UNITS if draft.given(f"--train-{unit}")), None)
    for name in filter(None, (decay, warmup)):
        # Megatron-DeepSpeed may count the decay in tokens whatever the run is counted in.
        mixed = run is not None and _unit(name) not in (_unit(run), "tokens", None)
        if mixed:
            unit = _unit(run or "")
            draft.refuse(f"the run is counted in {unit}", name, f"give the option in {unit}")
    draft.set("schedule.type", kind, "--lr-decay-style")
    length = draft.get(decay) if decay else None
    if warmup is None:
        draft.set("schedule.warmup", "0 steps", "--lr-warmup-iters")
    elif warmup != "--lr-warmup-fraction":
        draft.set("schedule.warmup", f"{draft.get(warmup)} {_unit(warmup)}", warmup)
    elif decay is None:
        draft.set("schedule.warmup", draft.get(warmup), warmup)
    else:
        exact = draft.get(warmup) * length
        draft.set("schedule.warmup", f"{round(exact)} {_unit(decay)}", warmup, decay)
        if abs(round(exact) - exact) > 1e-6:
            draft.change(warmup, f"{exact:g} {_unit(decay)} are rounded to {round(exact)}")
    if kind == "constant":
        for name in filter(None, (decay, "--min-lr" if draft.given("--min-lr") else None)):
            draft.ignore(name, "the learning rate is constant")
    else:
        draft.set("schedule.min_lr", draft.get("--min-lr"), "--min-lr")
    if decay is not None and kind in ("linear", "cosine"):
        draft.set("schedule.decay", f"{length} {_unit(decay)}", decay)
    elif decay is not None and kind in ("inverse-sqrt", "warmup-stable-decay"):
        if run is None or (length, _unit(decay)) != (draft.get(run), _unit(run)):
            what = "this schedule lasts as long as the run here"
            draft.refuse(what, decay, "leave it out, or give the length of the run")
        else:
            draft.ignore(decay, "the decay ends with the run")
    _stable_decay(draft, kind)


def _stable_decay(draft: Draft, kind: str | None) -> None:
    """The end of a schedule that is flat before."""
    names = ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples")
    if kind != "warmup-stable-decay":
        for name in (*names, "--lr-wsd-decay-style"):
            if draft.given(name):
                draft.ignore(name, "only --lr-decay-style WSD uses it")
        return
    tail = draft.only_one(*names)
    if tail is None:
        draft.refuse("the length of the final decay is not given", names[0], "add it")
    else:
        draft.set("schedule.decay", f"{draft.get(tail)} {_unit(tail)}", tail)
    shape = draft.choice("--lr-wsd-decay-style")
    if shape is None and not draft.given("--lr-wsd-decay-style"):
        what = "its default, exponential, is not one of the shapes here"
        draft.refuse(what, "--lr-wsd-decay-style", "give linear, cosine or minus_sqrt")
    elif shape is not None:
        draft.set("schedule.shape", shape, "--lr-wsd-decay-style")


def precision(draft: Draft) -> None:
    """Number format, and the loss scale of fp16."""
    name = draft.only_one("--fp16", "--bf16")
    if name is None:
        draft.set("precision.tf32", False, "--fp16", "--bf16")
    else:
        draft.set("precision.compute", name.removeprefix("--"), name)
    scales = {
        "--initial-loss-scale": "initial",
        "--min-loss-scale": "minimum",
        "--loss-scale-window": "window",
        "--hysteresis": "hysteresis",
    }
    static = draft.get("--loss-scale")
    for option, setting in scales.items():
        if not draft.given(option):
            continue
        if name != "--fp16":
            draft.ignore(option, "only fp16 has a loss scale")
        elif static is not None:
            draft.ignore(option, "--loss-scale makes the scale constant")
        else:
            value = draft.get(option)
            value = int(value) if setting == "window" else value
            draft.set(f"precision.loss_scale.{setting}", value, option)
    if static is not None and name != "--fp16":
        draft.ignore("--loss-scale", "only fp16 has a loss scale")
    elif static is not None:
        for setting, value in (("initial", static), ("minimum", static), ("window", _NEVER)):
            draft.set(f"precision.loss_scale.{setting}", value, "--loss-scale")


def recompute(draft: Draft) -> None:
    """Which activations are computed again."""
    full = ("--checkpoint-activations", "--deepspeed-activation-checkpointing")
    asked = draft.get("--recompute-granularity")
    old = next((name for name in full if draft.given(name)), None)
    if asked is not None:
        draft.set("train.recompute", asked, "--recompute-granularity", "--recompute-activations")
    elif old is not None:
        draft.set("train.recompute", "full", *full)
    elif draft.given("--recompute-activations"):
        draft.set("train.recompute", "selective", "--recompute-activations")
    draft.account(*full, "--recompute-activations")


def shape(draft: Draft) -> None:
    """Inner width, activation, heads, dropout and biases."""
    gated, width = draft.given("--swiglu"), draft.get("--hidden-size")
    kinds = {
        "--swiglu": "swiglu",
        "--squared-relu": "relu2",
        "--openai-gelu": "gelu_tanh",
        "--no-bias-gelu-fusion": "gelu",
    }
    chosen = draft.only_one("--swiglu", "--squared-relu", "--openai-gelu")
    if chosen is None and draft.given("--no-bias-gelu-fusion"):
        chosen = "--no-bias-gelu-fusion"
    elif draft.given("--no-bias-gelu-fusion"):
        draft.ignore("--no-bias-gelu-fusion", f"with {chosen} nothing is fused with GELU")
    if chosen is not None:
        draft.set("model.activation", kinds[chosen], chosen)
    if draft.given("--ffn-hidden-size"):
        draft.set("model.mlp_width", draft.get("--ffn-hidden-size"), "--ffn-hidden-size")
    elif gated and isinstance(width, int):
        # Megatron rounds down where our default rounds up.
        draft.set("model.mlp_width", int(8 * width / 3) // 64 * 64, "--hidden-size", "--swiglu")
    if draft.given("--group-query-attention"):
        names = ("--group-query-attention", "--num-query-groups")
        draft.set("model.kv_heads", draft.get("--num-query-groups"), *names)
    elif draft.given("--num-query-groups"):
        draft.ignore("--num-query-groups", "only --group-query-attention uses it")
    rates = ("--attention-dropout", "--hidden-dropout")
    if draft.get(rates[0]) != draft.get(rates[1]):
        what = f"{rates[0]} {draft.get(rates[0])} and {rates[1]} {draft.get(rates[1])} differ"
        name = next(name for name in rates if draft.given(name))
        draft.refuse(f"{what}, and there is one rate here", name, "give both the same value")
        draft.account(*rates)
    else:
        draft.set("model.dropout", draft.get(rates[0]), *rates)
    if draft.given("--disable-bias-linear"):
        draft.set("model.bias", False, "--disable-bias-linear")
        if draft.get("--normalization") != "RMSNorm":
            draft.change("--disable-bias-linear", "LayerNorm has no biases either here")
    if draft.given("--qk-layernorm"):
        draft.set("model.qk_norm", True, "--qk-layernorm")
        if draft.get("--normalization") != "RMSNorm":
            draft.change("--qk-layernorm", "queries and keys have an RMSNorm here")


def positions(draft: Draft) -> None:
    """Position embeddings, sample length and context."""
    length, most = draft.get("--seq-length"), draft.get("--max-position-embeddings")
    if most is not None:
        draft.set("model.context", most, "--max-position-embeddings")
        if length is not None and length == most:
            draft.account("--seq-length")
        elif length is not None:
            draft.set("data.sequence", length, "--seq-length")
    elif length is not None:
        draft.set("model.context", length, "--seq-length")
    kind = draft.choice("--position-embedding-type")
    if draft.given("--use-rotary-position-embeddings"):
        kind = "rotary"
    names = ("--position-embedding-type", "--use-rotary-position-embeddings")
    if kind is not None:
        draft.set("model.positions", kind, *names)
    for name, setting in (("--rotary-base", "base"), ("--rotary-percent", "fraction")):
        if draft.given(name) and kind == "rotary":
            draft.set(f"model.rotary_{setting}", float(draft.get(name)), name)
        elif draft.given(name):
            draft.ignore(name, "only rotary positions use it")


def optimizer(draft: Draft) -> None:
    """The optimizer, and the options that only one of the two has."""
    kind = draft.choice("--optimizer")
    draft.set("optim.type", kind, "--optimizer")
    adam = {"--adam-beta1": "beta1", "--adam-beta2": "beta2", "--adam-eps": "eps"}
    own = adam if kind == "adamw" else {"--sgd-momentum": "momentum"}
    for name in (*adam, "--sgd-momentum"):
        if name not in own and draft.given(name):
            draft.ignore(name, f"--optimizer {draft.get('--optimizer')} does not use it")
        elif name in own:
            draft.set(f"optim.{own[name]}", draft.get(name), name)


def layout(draft: Draft) -> None:
    """What depends on the sizes of the layout."""
    tp, pp = draft.get("--tensor-model-parallel-size"), draft.get("--pipeline-model-parallel-size")
    if tp > 1:
        draft.set("parallel.sequence", draft.given("--sequence-parallel"), "--sequence-parallel")
    elif draft.given("--sequence-parallel"):
        draft.ignore("--sequence-parallel", "only tensor parallelism uses it, as in Megatron")
    name = "--num-layers-per-virtual-pipeline-stage"
    if draft.given(name):
        each, layers = draft.get(name), draft.get("--num-layers")
        if pp == 1:
            draft.ignore(name, "there is no pipeline")
        elif each < 1 or not isinstance(layers, int) or layers % (pp * each):
            what = f"{layers} layers cannot be divided among {pp} stages in groups of {each}"
            draft.refuse(what, name, "choose a divisor of the layers of a stage")
        else:
            draft.set("parallel.stages", layers // (pp * each), name)
            if layers // (pp * each) > 1:
                draft.set("parallel.schedule", "interleaved", name)
    keep = draft.choice("--zero-stage") if draft.given("--zero-stage") else None
    names = ["--use-distributed-optimizer", "--zero-stage"]
    if draft.given(names[0]) and draft.given(names[1]) and keep != "gradients":
        draft.refuse("asks for another sharding than --zero-stage", names[0], "leave one out")
    elif draft.given(names[0]) or keep not in (None, "off"):
        draft.set("parallel.dp_shard", "auto", *names)
        draft.set("parallel.keep", keep or "gradients", *names)
    elif keep == "off":
        draft.ignore("--zero-stage", "0 shards nothing, as is done in any case")
    multiple = draft.get("--make-vocab-size-divisible-by")
    padded = draft.get("--pad-vocab-size-to")
    if padded is None:
        draft.set("model.vocab_multiple", multiple, "--make-vocab-size-divisible-by")
        return
    draft.account("--make-vocab-size-divisible-by")
    if padded < 1 or padded % tp:
        what = f"{padded} rows cannot be divided among {tp} tensor-parallel ranks"
        draft.refuse(what, "--pad-vocab-size-to", f"give a multiple of {tp}")
    else:
        # The next multiple of the wanted size is that size, for all smaller vocabularies.
        draft.set("model.vocab_multiple", padded // tp, "--pad-vocab-size-to")


def data(draft: Draft) -> None:
    """Token files and how they are divided; `--eval-iters 0` holds nothing out for validation."""
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
    parts = str(draft.get("--split")).replace("/", ",").split(",")
    split = [*(part.strip() for part in parts), "0", "0"][:3]
    if none and split[1].strip("0."):
        try:
            # The same documents are trained on; nobody reads the others.
            unread = sum(map(float, split[1:]))
        except ValueError:
            draft.refuse("these are no proportions", "--split", "write three, such as 949,50,1")
            return
        split = [split[0], "0", f"{unread:g}"]
    draft.set("data.split", ",".join(split), "--split", *(["--eval-iters"] if none else []))


def _blend(draft: Draft, name: str) -> Any:
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


def tokenizer(draft: Draft) -> None:
    """The tokenizer, which Megatron's token files do not name."""
    kind = draft.get("--tokenizer-type")
    files = ("--vocab-file", "--merge-file")
    model = draft.only_one("--tokenizer-model", "--tokenizer-name-or-path")
    where = [os.path.dirname(draft.get(name)) or "." for name in files if draft.given(name)]
    if model is not None:
        draft.set("data.tokenizer", draft.get(model), model, "--tokenizer-type")
        for name in filter(draft.given, files):
            draft.ignore(name, f"{model} names the tokenizer")
    elif len(where) == 2 and where[0] == where[1]:
        draft.set("data.tokenizer", where[0], *files, "--tokenizer-type")
    elif where:
        what = "a vocabulary and its merges must lie in one folder"
        name = next(name for name in files if draft.given(name))
        draft.refuse(what, name, "give both files, from one folder")
        draft.account(*files)
    elif kind == "NullTokenizer":
        what = "a run needs the tokenizer of its token files"
        draft.refuse(what, "--tokenizer-type", "give --vocab-file and --merge-file")
    elif kind is not None:
        draft.ignore("--tokenizer-type", "the tokenizer is found beside the token files")


def validation(draft: Draft) -> None:
    """How often, and on how much."""
    batches, every = draft.get("--eval-iters"), draft.get("--eval-interval")
    if batches == 0:
        draft.account("--eval-iters")
        if draft.given("--eval-interval"):
            draft.ignore("--eval-interval", "--eval-iters 0 validates nothing")
        return
    held_out = str(draft.get("--split")).replace("/", ",").split(",")[1:2]
    if not draft.given("--train-data-path") and not "".join(held_out).strip(" 0."):
        for name in filter(draft.given, ("--eval-iters", "--eval-interval")):
            draft.ignore(name, "--split holds nothing out for validation")
        return
    sizes = ("--global-batch-size", "--micro-batch-size")
    size = next((draft.get(name) for name in sizes if draft.given(name)), 1)
    draft.set("validate.every", f"{every} steps", "--eval-interval")
    draft.set("validate.windows", batches * size, "--eval-iters")
    if draft.given("--eval-iters"):
        text = "every validation reads the same samples; Megatron reads new ones each time"
        draft.change("--eval-iters", text)


def folder(draft: Draft) -> None:
    """Where the run lies, what it is called, and what it starts from."""
    save, load = draft.get("--save"), draft.get("--load")
    named = draft.get("--wandb-exp-name")
    base = named or os.path.basename(os.path.normpath(save or "")) or "megatron"
    draft.set("name", run_name(base, "megatron"), "--wandb-exp-name" if named else "--save")
    if save is not None:
        draft.set("folder", save, "--save")
    else:
        text = "checkpoints are saved all the same, into the run's folder"
        draft.changed.append(Remark("without --save", text))
    same = save is not None and load is not None and _same(save, load)
    if draft.given("--finetune") and load is not None and not same:
        draft.set("model.start", load, "--load", "--finetune")
    elif draft.given("--finetune"):
        what = "starts a new run from weights, which are not in a folder of their own"
        draft.refuse(what, "--finetune", "give --load the folder of the weights, --save another")
        draft.account("--load")
    elif same:
        draft.account("--load")
    elif load is not None:
        what = "a run resumes in its own folder"
        draft.refuse(what, "--load", "give --save the same folder, or --finetune for its weights")
    elif save is not None:
        text = "a run that this folder holds is resumed, also without --load"
        draft.change("--save", text)
    every = draft.get("--save-interval")
    if every is not None:
        # Megatron deletes no checkpoint.
        for setting in ("every", "keep_every"):
            draft.set(f"checkpoint.{setting}", f"{every} steps", "--save-interval")
    if draft.given("--wandb-project") and draft.get("--wandb-project"):
        draft.set("track.wandb.project", draft.get("--wandb-project"), "--wandb-project")


def prepared_tokenizer(draft: Draft) -> None:
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
            draft.refuse("GPT-2's tokenizer has two files", model, "give --vocab-file, --merge-file")
        elif not any(map(draft.given, files)):
            draft.set("--tokenizer", "gpt2", "--tokenizer-type")
    else:
        what = "only tokenizers of GPT models are known"
        draft.refuse(what, "--tokenizer-type", "give GPT2BPETokenizer or HuggingFaceTokenizer")
    for name in filter(draft.given, files):
        if kind == "GPT2BPETokenizer" or model is None:
            draft.set(name, draft.get(name), name)
        else:
            draft.ignore(name, f"{model} names the tokenizer")
    ends = "--append-eod" if draft.given("--append-eod") else "--no-append-eod"
    draft.set(ends, True, "--append-eod")
    draft.account("--tokenizer-type")


def _same(one: str, other: str) -> bool:
    return os.path.normpath(one) == os.path.normpath(other)


def _unit(name: str) -> str | None:
    """The unit in which an option counts."""
    return _UNITS.get(name.rpartition("-")[2])


RULES = (
    horizon,
    batch,
    learning_rate,
    precision,
    recompute,
    shape,
    positions,
    optimizer,
    layout,
    data,
    tokenizer,
    validation,
    folder,
    prepared_tokenizer,
)
