"""Options of Megatron-LM and Megatron-DeepSpeed about the model, the run and its layout."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.dialects.draft import TranslationDraft

_UNITS = {"iters": "steps", "samples": "samples", "tokens": "tokens"}
_NEVER = 2**31 - 1
"""A window that no run is as long as."""


def megatron_horizon(draft: TranslationDraft) -> None:
    """The length of the run, in one of three units."""
    name = draft.only_one("--train-iters", "--train-samples", "--train-tokens")
    if name is None:
        draft.refuse("the length of the run is not given", "--train-iters", "add it")
        return
    amount, batch = draft.get(name), draft.get("--global-batch-size")
    by_samples = name == "--train-samples" and not _ramps(draft)
    if by_samples and batch is not None and 0 < batch < amount and amount % batch:
        # Megatron makes no step with fewer samples, and builds its order for all of them.
        draft.set("data.samples", amount, name)
        amount -= amount % batch
        draft.set("train.until", f"{amount} samples", name, "--global-batch-size")
        return
    draft.set("train.until", f"{amount} {_unit(name)}", name)


def megatron_batch(draft: TranslationDraft) -> None:
    """Global batch, micro-batch, and the batch ramp."""
    whole, ramp = draft.get("--global-batch-size"), draft.get("--rampup-batch-size")
    levels = batch_levels(draft)
    if draft.given("--micro-batch-size"):
        draft.take("train.micro_batch", "--micro-batch-size")
    if whole is not None:
        draft.set("train.batch", whole, "--global-batch-size")
    elif levels:
        draft.set("train.batch", levels[-1][1], "--step-batch-size-schedule")
    else:
        # One micro-batch of each data-parallel process.
        draft.set("train.accumulate", 1, "--global-batch-size")
    if levels and ramp is None:
        _stepwise(draft, levels)
    elif draft.given("--step-batch-size-schedule") and ramp is None:
        what = "this is no schedule of batches, or --seq-length is not given"
        draft.refuse(what, "--step-batch-size-schedule", 'write it as "0:384 200B:768"')
    if ramp is None:
        return
    if levels:
        what = "two ramps of the batch exclude one another"
        draft.refuse(what, "--rampup-batch-size", "leave one out")
    if not draft.given("--train-samples"):
        what = "a ramp is counted in samples, and the run is not"
        draft.refuse(what, "--rampup-batch-size", "give --train-samples, as Megatron wants it too")
        return
    start, by, over = ramp
    values = {"start": start, "by": by, "over": f"{over} samples"}
    draft.set_table("train.ramp", values, "--rampup-batch-size")


def _ramps(draft: TranslationDraft) -> bool:
    """Whether the batch grows."""
    return draft.given("--rampup-batch-size") or len(batch_levels(draft)) > 1


def batch_levels(draft: TranslationDraft) -> list[tuple[int, int]]:
    """The steps of `--step-batch-size-schedule` that the run reaches, as samples and the batch from
    there on; none if it is not given or cannot be read."""
    name, length = "--step-batch-size-schedule", draft.get("--seq-length")
    if not draft.given(name) or not isinstance(length, int) or length < 1:
        return []
    try:
        # Unquoted in a shell, its steps are words.
        written = " ".join(draft.get(name)).replace(",", " ")
        pairs = [entry.split(":") for entry in written.split()]
        # Megatron counts tokens where it knows the length of a sample.
        levels = sorted((_amount(tokens) // length, _amount(batch)) for tokens, batch in pairs)
    except ValueError:
        return []
    end = draft.get("--train-samples")
    return [level for level in levels if level[0] == 0 or end is None or level[0] < end]


def _amount(text: str) -> int:
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def _stepwise(draft: TranslationDraft, levels: Sequence[tuple[int, int]]) -> None:
    """A schedule of batches, which is a ramp here if its steps are equal."""
    name, whole = "--step-batch-size-schedule", draft.get("--global-batch-size")
    draft.account(name)
    (begin, start), *others = levels
    count = len(others)
    if whole not in (None, levels[-1][1]):
        what = f"its last batch {levels[-1][1]} is not --global-batch-size {whole}"
        draft.refuse(what, name, "leave one of the two out, as Megatron wants it")
    elif begin != 0:
        draft.refuse("its first step does not begin at 0", name, "write 0:BATCH first")
    elif count:
        by, over = others[0][1] - start, others[-1][0]
        equal = [
            (-(-number * over // count), start + number * by) for number in range(1, count + 1)
        ]
        if by < 1 or equal != others:
            what = "a batch grows by equal amounts in equally long steps here"
            draft.refuse(what, name, "give such steps, or a --global-batch-size")
            return
        values = {"start": start, "by": by, "over": f"{over} samples"}
        draft.set_table("train.ramp", values, name, "--seq-length")


def megatron_learning_rate(draft: TranslationDraft) -> None:
    """Warm-up and decay, each in iterations, samples or a fraction of the decay."""
    kind = draft.choice("--lr-decay-style")
    counted = ("--lr-warmup-iters", "--lr-warmup-samples")
    # Zero is their default.
    idle = [name for name in counted if draft.given(name) and draft.get(name) == 0]
    decay = draft.only_one(*(f"--lr-decay-{unit}" for unit in _UNITS))
    warmups = [name for name in ("--lr-warmup-fraction", *counted) if name not in idle]
    warmup = draft.only_one(*warmups)
    run = next((f"--train-{unit}" for unit in _UNITS if draft.given(f"--train-{unit}")), None)
    for name in filter(None, (decay, warmup)):
        # Megatron-DeepSpeed may count the decay in tokens whatever the run is counted in.
        mixed = run is not None and _unit(name) not in (_unit(run), "tokens", None)
        if mixed:
            unit = _unit(run or "")
            draft.refuse(f"the run is counted in {unit}", name, f"give the option in {unit}")
    if decay is None and run is not None and not _ends_with_run(draft, run):
        decay = run
    draft.set("schedule.type", kind, "--lr-decay-style")
    _warmup(draft, warmup, decay, idle)
    if kind == "constant":
        decays = (f"--lr-decay-{unit}" for unit in _UNITS)
        draft.ignore_given("the learning rate is constant", "--min-lr", *decays)
    else:
        draft.take("schedule.min_lr", "--min-lr")
    if decay is not None and kind is not None and kind != "constant":
        end = "decay" if kind in ("linear", "cosine") else "end"
        draft.set(f"schedule.{end}", _span(draft, decay), decay)
    _stable_decay(draft, kind)


def _ends_with_run(draft: TranslationDraft, run: str) -> bool:
    """Whether a decay over the whole run is one up to our last step: Megatron's last samples may
    not fill a step, and iterations of a ramp count as full ones."""
    whole = draft.get("--global-batch-size")
    if _ramps(draft) or batch_levels(draft):
        return False
    return _unit(run) != "samples" or not whole or draft.get(run) % whole == 0


def _warmup(
    draft: TranslationDraft, warmup: str | None, decay: str | None, idle: Sequence[str]
) -> None:
    """The rise at the start."""
    initial = "--lr-warmup-init"
    if warmup is None:
        draft.set("schedule.warmup", "0 steps", *(idle or ["--lr-warmup-iters"]))
        draft.ignore_given("there is no warm-up", initial)
        return
    draft.account(*idle)
    if draft.given(initial) and draft.get(initial):
        draft.take("schedule.initial_lr", initial)
    elif draft.given(initial):
        draft.ignore(initial, "a warm-up starts at zero in any case")
    if warmup != "--lr-warmup-fraction":
        draft.set("schedule.warmup", _span(draft, warmup), warmup)
        return
    if decay is None:
        draft.take("schedule.warmup", warmup)
        return
    # Megatron counts in samples, and in fractions of them.
    unit, whole = str(_unit(decay)), draft.get("--global-batch-size") or 0
    exact = draft.get(warmup) * draft.get(decay)
    if unit == "steps" and whole and (_ramps(draft) or abs(round(exact) - exact) > 1e-6):
        unit, exact = "samples", draft.get(warmup) * (draft.get(decay) * whole)
    draft.set("schedule.warmup", f"{round(exact)} {unit}", warmup, decay)
    if abs(round(exact) - exact) > 1e-6:
        draft.change(warmup, f"{exact:g} {unit} are rounded to {round(exact)}")


def _span(draft: TranslationDraft, name: str) -> str:
    """The value of an option with its unit. Iterations are as many full batches to Megatron's
    scheduler, also while the batch grows."""
    amount, unit, whole = draft.get(name), _unit(name), draft.get("--global-batch-size")
    if unit == "steps" and _ramps(draft):
        levels = batch_levels(draft)
        if whole is None and levels:
            whole = levels[-1][1]
        return f"{amount * (whole or 1)} samples"
    return f"{amount} {unit}"


def _stable_decay(draft: TranslationDraft, kind: str | None) -> None:
    """The end of a schedule that is flat before."""
    names = ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples")
    if kind != "warmup-stable-decay":
        why = "only --lr-decay-style WSD uses it"
        draft.ignore_given(why, *names, "--lr-wsd-decay-style")
        return
    tail = draft.only_one(*names)
    if tail is None:
        draft.refuse("the length of the final decay is not given", names[0], "add it")
    else:
        draft.set("schedule.decay", _span(draft, tail), tail)
    shape = draft.choice("--lr-wsd-decay-style")
    if shape is not None:
        draft.set("schedule.shape", shape, "--lr-wsd-decay-style")


def megatron_fp8(draft: TranslationDraft) -> None:
    """Products of blocks in fp8; Megatron keeps the head in half precision too."""
    kind = draft.get("--fp8-format")
    if kind is None:
        return
    if kind != "hybrid":
        what = "gradients are in e5m2 here, and everything else in e4m3"
        draft.refuse(what, "--fp8-format", "give hybrid")
    elif not draft.given("--bf16"):
        draft.refuse(
            "activations are in bf16 where products are in fp8", "--fp8-format", "add --bf16"
        )
    else:
        draft.set("precision.fp8", ["mlp", "attention"], "--fp8-format")


def megatron_precision(draft: TranslationDraft) -> None:
    """Number format, and the loss scale of fp16."""
    name = draft.only_one("--fp16", "--bf16")
    if name is None:
        draft.set("precision.compute", "fp32", "--fp16", "--bf16")
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
        values = {"initial": static, "minimum": static, "window": _NEVER}
        draft.set_table("precision.loss_scale", values, "--loss-scale")


def megatron_recompute(draft: TranslationDraft) -> None:
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


def megatron_shape(draft: TranslationDraft) -> None:
    """Inner width, activation, heads, dropout and biases."""
    given, gated, width = draft.given, draft.given("--swiglu"), draft.get("--hidden-size")
    kinds = {
        "--swiglu": "swiglu",
        "--squared-relu": "relu2",
        "--openai-gelu": "gelu_tanh",
    }
    chosen = draft.only_one("--swiglu", "--squared-relu", "--openai-gelu")
    # Megatron's fused GELU is the approximation by tanh, and the other one is exact.
    unfused = [name for name in ("--no-bias-gelu-fusion", "--disable-bias-linear") if given(name)]
    if chosen is None and unfused:
        draft.set("model.activation", "gelu", *unfused)
    elif draft.given("--no-bias-gelu-fusion"):
        draft.ignore("--no-bias-gelu-fusion", f"with {chosen} nothing is fused with GELU")
    if chosen is not None:
        draft.set("model.activation", kinds[chosen], chosen)
    if draft.given("--ffn-hidden-size"):
        draft.take("model.mlp_width", "--ffn-hidden-size")
    elif gated and isinstance(width, int):
        # Megatron rounds down where our default rounds up.
        draft.set("model.mlp_width", int(8 * width / 3) // 64 * 64, "--hidden-size", "--swiglu")
    if draft.given("--group-query-attention"):
        names = ("--group-query-attention", "--num-query-groups")
        draft.set("model.kv_heads", draft.get("--num-query-groups"), *names)
    elif draft.given("--num-query-groups"):
        draft.ignore("--num-query-groups", "only --group-query-attention uses it")
    rates = ("--hidden-dropout", "--attention-dropout")
    if draft.get(rates[0]) == draft.get(rates[1]):
        draft.set("model.dropout", draft.get(rates[0]), *rates)
    else:
        draft.take("model.dropout", rates[0])
        draft.take("model.attention_dropout", rates[1])
    if draft.given("--disable-bias-linear"):
        draft.set("model.bias", False, "--disable-bias-linear")
        if draft.get("--normalization") != "RMSNorm":
            draft.change("--disable-bias-linear", "LayerNorm has no biases either here")
    if draft.given("--qk-layernorm"):
        draft.set("model.qk_norm", True, "--qk-layernorm")
        if draft.get("--normalization") != "RMSNorm":
            draft.change("--qk-layernorm", "queries and keys have an RMSNorm here")


def megatron_positions(draft: TranslationDraft) -> None:
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
    if draft.given("--no-position-embedding"):
        if kind == "rotary":
            draft.ignore("--no-position-embedding", "rotary positions have no embedding")
        else:
            what = "models here know positions, and so do Megatron's now"
            draft.refuse(what, "--no-position-embedding", "give --position-embedding-type rope")
    for name, setting in (("--rotary-base", "base"), ("--rotary-percent", "fraction")):
        if draft.given(name) and kind == "rotary":
            draft.set(f"model.rotary_{setting}", float(draft.get(name)), name)
        elif draft.given(name):
            draft.ignore(name, "only rotary positions use it")


def megatron_optimizer(draft: TranslationDraft) -> None:
    """The optimizer, and the options that only one of the two has."""
    kind = draft.choice("--optimizer")
    draft.set("optim.type", kind, "--optimizer")
    adam = {"--adam-beta1": "beta1", "--adam-beta2": "beta2", "--adam-eps": "eps"}
    own = adam if kind == "adamw" else {"--sgd-momentum": "momentum"}
    for name in (*adam, "--sgd-momentum"):
        if name not in own and draft.given(name):
            draft.ignore(name, f"--optimizer {draft.get('--optimizer')} does not use it")
        elif name in own:
            draft.take(f"optim.{own[name]}", name)
    _decoupled_rates(draft, kind)


def _decoupled_rates(draft: TranslationDraft, kind: str | None) -> None:
    """Rates of embedding and head. Their floor is a rate too, --min-lr if there is no other."""
    peak, floor = "--decoupled-lr", "--decoupled-min-lr"
    if not draft.given(peak):
        draft.ignore_given(f"only {peak} uses it", floor)
        return
    if kind != "adamw":
        draft.refuse("SGD has one learning rate here", peak, "leave it out")
        draft.account(floor)
        return
    roles = ["embedding"]
    roles += ["head"] if draft.given("--untie-embeddings-and-output-weights") else []
    constant = draft.choice("--lr-decay-style") == "constant"
    lowest = floor if draft.given(floor) else "--min-lr"
    for role in roles:
        draft.take(f"optim.{role}_lr", peak)
        if not constant:
            draft.take(f"optim.{role}_min_lr", lowest)
    if constant and draft.given(floor):
        draft.ignore(floor, "the learning rate is constant")
    if draft.choice("--position-embedding-type") == "learned":
        draft.change(peak, "learned positions have this rate too")


def megatron_layout(draft: TranslationDraft) -> None:
    """What depends on the sizes of the layout."""
    tp, pp = draft.get("--tensor-model-parallel-size"), draft.get("--pipeline-model-parallel-size")
    if tp > 1:
        draft.set("parallel.sequence", draft.given("--sequence-parallel"), "--sequence-parallel")
    elif draft.given("--sequence-parallel"):
        draft.ignore("--sequence-parallel", "only tensor parallelism uses it, as in Megatron")
    _virtual_stages(draft, pp)
    _sharding(draft)
    _context(draft)
    padded = draft.get("--pad-vocab-size-to")
    if padded is None:
        draft.take("model.vocab_multiple", "--make-vocab-size-divisible-by")
        return
    draft.ignore_given("--pad-vocab-size-to counts", "--make-vocab-size-divisible-by")
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
    backends = {kinds.get(kind) for kind in draft.get(name)}
    if cp in (None, 1):
        draft.ignore(name, "only --context-parallel-size uses it")
    elif len(backends) == 1 and None not in backends:
        draft.set("parallel.attention", backends.pop(), name)
    else:
        draft.set("parallel.attention", "ring", name)
        draft.change(name, "all layers exchange keys and values in a ring; the result is the same")


def _unit(name: str) -> str | None:
    """The unit in which an option counts."""
    return _UNITS.get(name.rpartition("-")[2])


RULES = (
    megatron_horizon,
    megatron_batch,
    megatron_learning_rate,
    megatron_precision,
    megatron_fp8,
    megatron_recompute,
    megatron_shape,
    megatron_positions,
    megatron_optimizer,
    megatron_layout,
)
