"""Options of Megatron-LM and Megatron-DeepSpeed about the run's length, batch and learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.dialects.draft import TranslationDraft

_UNITS = {"iters": "steps", "samples": "samples", "tokens": "tokens"}


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


def _unit(name: str) -> str | None:
    """The unit in which an option counts."""
    return _UNITS.get(name.rpartition("-")[2])


RULES = (megatron_horizon, megatron_batch, megatron_learning_rate)
