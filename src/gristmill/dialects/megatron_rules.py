"""Options of Megatron-LM and Megatron-DeepSpeed about the model, the run and its layout."""

from __future__ import annotations

from gristmill.dialects.draft import TranslationDraft

_UNITS = {"iters": "steps", "samples": "samples", "tokens": "tokens"}
_NEVER = 2**31 - 1
"""A window that no run is as long as."""


def horizon(draft: TranslationDraft) -> None:
    """The length of the run, in one of three units."""
    name = draft.only_one("--train-iters", "--train-samples", "--train-tokens")
    if name is None:
        draft.refuse("the length of the run is not given", "--train-iters", "add it")
        return
    amount, batch = draft.get(name), draft.get("--global-batch-size")
    by_samples = name == "--train-samples" and not draft.given("--rampup-batch-size")
    if by_samples and batch is not None and 0 < batch < amount and amount % batch:
        # Megatron makes no step with fewer samples, and builds its order for all of them.
        draft.set("data.samples", amount, name)
        amount -= amount % batch
        draft.set("train.until", f"{amount} samples", name, "--global-batch-size")
        return
    draft.set("train.until", f"{amount} {_unit(name)}", name)


def batch(draft: TranslationDraft) -> None:
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


def learning_rate(draft: TranslationDraft) -> None:
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


def _stable_decay(draft: TranslationDraft, kind: str | None) -> None:
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


def precision(draft: TranslationDraft) -> None:
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


def recompute(draft: TranslationDraft) -> None:
    """Which activations are computed again."""
    full = (
        "--checkpoint-activations",
        "--deepspeed-activation-checkpointing",
        "--activations-checkpoint-method",
    )
    asked = draft.get("--recompute-granularity")
    names = ("--recompute-granularity", "--recompute-activations", *full)
    if asked is not None:
        draft.set("train.recompute", asked, *names)
    elif any(map(draft.given, full)):
        draft.set("train.recompute", "full", *names)
    elif draft.given("--recompute-activations"):
        draft.set("train.recompute", "selective", *names)


def shape(draft: TranslationDraft) -> None:
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


def positions(draft: TranslationDraft) -> None:
    """Position embeddings, sample length and context."""
    length, most = draft.get("--seq-length"), draft.get("--max-position-embeddings")
    if most is not None:
        both = ("--max-position-embeddings", "--seq-length")
        draft.set("model.context", most, *(both if length == most else both[:1]))
        if length not in (None, most):
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


def optimizer(draft: TranslationDraft) -> None:
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


def layout(draft: TranslationDraft) -> None:
    """What depends on the sizes of the layout."""
    tp, pp = draft.get("--tensor-model-parallel-size"), draft.get("--pipeline-model-parallel-size")
    if tp > 1:
        draft.set("parallel.sequence", draft.given("--sequence-parallel"), "--sequence-parallel")
    elif draft.given("--sequence-parallel"):
        draft.ignore("--sequence-parallel", "only tensor parallelism uses it, as in Megatron")
    _virtual_stages(draft, pp)
    _sharding(draft)
    _context(draft)
    multiple = draft.get("--make-vocab-size-divisible-by")
    padded = draft.get("--pad-vocab-size-to")
    if padded is None:
        draft.set("model.vocab_multiple", multiple, "--make-vocab-size-divisible-by")
        return
    if draft.given("--make-vocab-size-divisible-by"):
        draft.ignore("--make-vocab-size-divisible-by", "--pad-vocab-size-to counts")
    if padded < 1 or tp < 1 or padded % tp:
        what = f"{padded} rows cannot be divided among {tp} tensor-parallel ranks"
        draft.refuse(what, "--pad-vocab-size-to", f"give a multiple of {tp}")
    else:
        # The next multiple of the wanted size is that size, for all smaller vocabularies.
        draft.set("model.vocab_multiple", padded // tp, "--pad-vocab-size-to")


def _virtual_stages(draft: TranslationDraft, pp: int) -> None:
    """Several groups of layers on each device, counted in layers or in groups."""
    names = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
    name = draft.only_one(*names)
    if name is None:
        return
    count, layers = draft.get(name), draft.get("--num-layers")
    if pp == 1:
        draft.ignore(name, "there is no pipeline")
        return
    parts = pp * count
    if parts < 1 or not isinstance(layers, int) or layers % parts:
        what = f"{layers} layers cannot be divided among {pp} stages in this way"
        draft.refuse(what, name, "choose a divisor of the layers of a stage")
        return
    stages = count if name == names[1] else layers // parts
    draft.set("parallel.stages", stages, name)
    if stages > 1:
        draft.set("parallel.schedule", "interleaved", name)


def _sharding(draft: TranslationDraft) -> None:
    """What data-parallel processes keep whole, by whichever of Megatron's means."""
    fsdp = ("--use-torch-fsdp2", "--use-megatron-fsdp")
    strategy, optimizer = "--data-parallel-sharding-strategy", "--use-distributed-optimizer"
    chosen = draft.only_one("--zero-stage", *fsdp)
    if draft.given(strategy) and chosen != fsdp[1]:
        draft.ignore(strategy, f"only {fsdp[1]} uses it")
    keep: str | None = None
    names = [name for name in (chosen, optimizer) if name is not None and draft.given(name)]
    if chosen == "--zero-stage":
        keep = draft.choice(chosen)
    elif chosen is not None:
        keep = draft.choice(strategy) if chosen == fsdp[1] else "nothing"
        names += [strategy] if chosen == fsdp[1] else []
    elif names:
        keep = "gradients"
    if chosen == "--zero-stage" and draft.given(optimizer) and keep != "gradients":
        draft.refuse("asks for another sharding than --zero-stage", optimizer, "leave one out")
    elif keep == "off" and chosen is not None:
        draft.ignore(chosen, "nothing is sharded, as is done in any case")
        draft.account(*names)
    elif keep is not None:
        draft.set("parallel.dp_shard", "auto", *names)
        draft.set("parallel.keep", keep, *names)


def _context(draft: TranslationDraft) -> None:
    """How context parallelism attends."""
    name, cp = "--cp-comm-type", draft.get("--context-parallel-size")
    if not draft.given(name):
        return
    kinds = {"p2p": "ring", "a2a": "heads"}
    found = {kinds.get(kind) for kind in draft.get(name)}
    if cp in (None, 1):
        draft.ignore(name, "only --context-parallel-size uses it")
    elif len(found) == 1 and None not in found:
        draft.set("parallel.attention", found.pop(), name)
    else:
        draft.refuse("attention is p2p or a2a here, in all layers", name, "give p2p or a2a")


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
)
