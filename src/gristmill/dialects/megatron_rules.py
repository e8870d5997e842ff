"""Options of Megatron-LM and Megatron-DeepSpeed about model, precision, optimizer and layout."""

from __future__ import annotations

from gristmill.dialects.draft import TranslationDraft

_NEVER = 2**31 - 1
"""A window that no run is as long as."""


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


RULES = (
    megatron_precision,
    megatron_fp8,
    megatron_recompute,
    megatron_shape,
    megatron_positions,
    megatron_optimizer,
    megatron_layout,
)
