"""Every schedule against its formula, written once more in steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.optim.schedule import Schedule, build_schedule

PEAK, STEPS, BATCH, SEQUENCE = 1e-3, 200, 12, 128
RUN = f"""\
name = "trial"
preset = "gpt2-nano"
data.paths = "tokens/books"
train.until = "{STEPS} steps"
train.batch = {BATCH}
optim.lr = {PEAK}
"""


def schedule(*words: str) -> Schedule:
    config = load_text(RUN, tuple(f"schedule.{word}" for word in words), place="run.toml")
    return build_schedule(config, resolve(config, vocab=300))


def rate(of: Schedule, step: int) -> float:
    return of.rate(Progress(step, step * BATCH, step * BATCH * SEQUENCE))


def curve(*words: str) -> list[float]:
    made = schedule(*words)
    return [rate(made, step) for step in range(0, 250, 3)]


def fall(low: float, height: float) -> float:
    return low + (PEAK - low) * height


def cosine(time: float) -> float:
    return (1 + math.cos(math.pi * min(time, 1.0))) / 2


# With a warm-up of 20 steps and, where there is one, a lowest rate of 1e-4.
SHAPES: dict[str, tuple[list[str], Callable[[int], float]]] = {
    "constant": (["type=constant"], lambda step: PEAK),
    "linear": (
        ["type=linear", "min_lr=1e-4"],
        lambda step: fall(1e-4, 1 - min(1.0, (step - 20) / 180)),
    ),
    "linear with an earlier end": (
        ["type=linear", "min_lr=1e-4", "decay=120 steps"],
        lambda step: fall(1e-4, 1 - min(1.0, (step - 20) / 100)),
    ),
    "cosine": (
        ["type=cosine", "min_lr=1e-4"],
        lambda step: fall(1e-4, cosine((step - 20) / 180)),
    ),
    "cosine with a later end": (
        ["type=cosine", "min_lr=1e-4", "decay=400 steps"],
        lambda step: fall(1e-4, cosine((step - 20) / 380)),
    ),
    "cosine with restarts": (
        ["type=cosine-restarts", "min_lr=1e-4", "cycles=3"],
        lambda step: fall(1e-4, cosine((step - 20) % 60 / 60)) if step < STEPS else 1e-4,
    ),
    "linear over the whole run": (
        ["type=linear", "min_lr=1e-4", "decay=1"],
        lambda step: fall(1e-4, 1 - min(1.0, (step - 20) / 180)),
    ),
    "polynomial": (
        ["type=polynomial", "min_lr=1e-4", "power=3.0"],
        lambda step: fall(1e-4, (1 - min(1.0, (step - 20) / 180)) ** 3),
    ),
    "inverse-sqrt": (["type=inverse-sqrt"], lambda step: PEAK / math.sqrt(max(step, 20) / 20)),
    "flat, then a line": (
        ["type=warmup-stable-decay", "min_lr=1e-4", "decay=50 steps"],
        lambda step: fall(1e-4, 1 - min(1.0, max(0, step - 150) / 50)),
    ),
    "flat, then a half wave": (
        ["type=warmup-stable-decay", "min_lr=1e-4", "decay=50 steps", "shape=cosine"],
        lambda step: fall(1e-4, cosine(max(0, step - 150) / 50)),
    ),
    "flat, then one minus a root": (
        ["type=warmup-stable-decay", "min_lr=1e-4", "decay=50 steps", "shape=sqrt"],
        lambda step: fall(1e-4, 1 - math.sqrt(min(1.0, max(0, step - 150) / 50))),
    ),
    "flat, then an exponential": (
        ["type=warmup-stable-decay", "min_lr=1e-4", "decay=50 steps", "shape=exponential"],
        lambda step: fall(1e-4, 2 ** (1 - min(1.0, max(0, step - 150) / 50)) - 1),
    ),
    "flat, then a line to a later end": (
        ["type=warmup-stable-decay", "min_lr=1e-4", "decay=50 steps", "end=220 steps"],
        lambda step: fall(1e-4, 1 - min(1.0, max(0, step - 170) / 50)),
    ),
    "inverse-sqrt to an end": (
        ["type=inverse-sqrt", "min_lr=1e-4", "end=150 steps"],
        lambda step: max(1e-4, PEAK / math.sqrt(step / 20)) if step <= 150 else 1e-4,
    ),
}


@pytest.mark.parametrize(("words", "formula"), SHAPES.values(), ids=SHAPES.keys())
def test_a_schedule_follows_its_formula(words: list[str], formula: Callable[[int], float]) -> None:
    made = schedule(*words, "warmup=20 steps")
    assert rate(made, 0) == pytest.approx(PEAK / 20)
    assert rate(made, 9) == pytest.approx(PEAK / 2)
    assert rate(made, 19) == PEAK
    assert rate(made, 20) == pytest.approx(PEAK)
    for step in [21, 50, 79, 80, 110, 149, 150, 151, 175, 198, 199, 200, 201, 1000]:
        assert rate(made, step) == pytest.approx(formula(step), rel=1e-12), step


@pytest.mark.parametrize("words", [row[0] for row in SHAPES.values()], ids=SHAPES.keys())
@pytest.mark.parametrize("warmup", ["20 steps", "1 steps", "7 samples", "125 samples"])
def test_no_step_has_a_rate_of_zero_or_above_the_peak(words: list[str], warmup: str) -> None:
    ends = ("min_lr", "decay=120", "end=150")
    without_floor = [word for word in words if not word.startswith(ends)]
    made = schedule(*without_floor, f"warmup={warmup}")
    rates = [rate(made, step) for step in range(STEPS)]
    assert min(rates) > 0
    assert max(rates) == PEAK
    last = (made.warmup - 1) // BATCH
    assert rates[last] == PEAK
    assert rates[: last + 1] == sorted(rates[: last + 1])


MEGATRON = {
    "constant": (["type=constant"], lambda s: PEAK),
    "linear": (["type=linear", "min_lr=1e-4"], lambda s: fall(1e-4, 1 - (s - 240) / 2160)),
    "cosine": (["type=cosine", "min_lr=1e-4"], lambda s: fall(1e-4, cosine((s - 240) / 2160))),
    "inverse-sqrt": (["type=inverse-sqrt"], lambda s: PEAK * (240 / s) ** 0.5),
    "wsd": (
        ["type=warmup-stable-decay", "decay=50 steps", "shape=exponential"],
        lambda s: PEAK * (1.0 if s <= 1800 else 2 * 0.5 ** ((s - 1800) / 600) - 1),
    ),
}
"""By Megatron's scheduler: a warm-up of 20 steps or 240 samples, and s samples before a step."""


@pytest.mark.parametrize("initial", [0.0, 2e-5])
@pytest.mark.parametrize(("words", "formula"), MEGATRON.values(), ids=MEGATRON.keys())
def test_megatrons_convention(
    words: list[str], formula: Callable[[int], float], initial: float
) -> None:
    more = ["convention=megatron", "warmup=20 steps", f"initial_lr={initial}"]
    made = schedule(*words, *more)
    for step in (0, 1, 7, 19, 20, 21, 100, 150, 151, 199):
        samples = step * BATCH
        rising = initial + (PEAK - initial) * samples / 240
        expected = rising if samples <= 240 else formula(samples)
        assert rate(made, step) == pytest.approx(expected, rel=1e-13), step


def test_skipped_fp16_steps_hold_megatrons_rate() -> None:
    def built(*words: str) -> Schedule:
        config = load_text(RUN, words, place="run.toml")
        return build_schedule(config, resolve(config, vocab=300))

    where, megatron = Progress(9, 9 * BATCH, 0), 'schedule.convention="megatron"'
    held = built(megatron, 'precision.compute="fp16"')
    assert held.holds
    after = held.rate(where, skipped_samples=3 * BATCH)
    assert after == held.rate(Progress(6, 6 * BATCH, 0)) != held.rate(where)
    # Nothing waits for the device where no loss scale is searched for, or with our own convention.
    for words in ((megatron,), ('precision.compute="fp16"',)):
        made = built(*words)
        assert not made.holds
        assert made.rate(where, skipped_samples=3 * BATCH) == made.rate(where)


def test_a_warm_up_may_begin_above_zero() -> None:
    made = schedule("type=constant", "warmup=20 steps", "initial_lr=2e-4")
    assert [rate(made, step) for step in (0, 9, 19)] == pytest.approx([2.4e-4, 6e-4, PEAK])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("schedule.initial_lr=1.0",), "1.0 is above the peak"),
        (("schedule.initial_lr=1e-5", "schedule.warmup=0"), "has no effect without a warm-up"),
        (('schedule.type="inverse-sqrt"', "schedule.warmup=0"), "needs a warm-up above zero"),
        (
            ('schedule.type="warmup-stable-decay"', 'schedule.decay="50 steps"',
             'schedule.end="40 steps"'),
            "longer than the run up to schedule.end",
        ),
        (('schedule.type="constant"', "optim.embedding_min_lr=1e-5"), "with a constant schedule"),
        (("optim.embedding_min_lr=1.0",), r"1.0 is above the peak optim.embedding_lr"),
        (
            ('schedule.convention="megatron"', 'precision.compute="fp16"',
             'parallel.local.every="2 steps"'),
            "workers skip their own fp16 steps",
        ),
    ],
)  # fmt: skip
def test_what_schedules_refuse(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_text(RUN, words, place="run.toml")
    assert message in str(caught.value)


def test_megatron_may_fall_from_the_first_sample() -> None:
    made = schedule("type=inverse-sqrt", "warmup=0", "convention=megatron")
    assert [rate(made, step) for step in (0, 1, 3)] == pytest.approx(
        [PEAK, PEAK / 12**0.5, PEAK / 6]
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine-restarts", "polynomial"])
def test_without_a_warm_up_the_first_step_has_the_peak(kind: str) -> None:
    assert rate(schedule(f"type={kind}", "warmup=0.0"), 0) == PEAK


def test_a_decay_of_the_whole_run_is_a_line_from_the_start() -> None:
    made = schedule("type=warmup-stable-decay", "warmup=0", "decay=1")
    for step in (0, 1, 100, 199, 200, 300):
        assert rate(made, step) == pytest.approx(PEAK * (1 - min(1.0, step / STEPS)))


def same(*spans: str) -> list[str]:
    return [f"{name}={span}" for name, span in zip(("warmup", "decay"), spans, strict=False)]


@pytest.mark.parametrize(
    "kind", ["linear", "cosine", "cosine-restarts", "polynomial", "warmup-stable-decay"]
)
def test_the_curve_is_the_same_in_every_unit(kind: str) -> None:
    spans = {
        "steps": same("40 steps", "100 steps"),
        "samples": same("480 samples", "1200 samples"),
        "tokens": same("61.44k tokens", "153.6k tokens"),
        "fractions": same("0.2", "0.5"),
    }
    curves = {unit: curve(f"type={kind}", *words) for unit, words in spans.items()}
    for unit, rates in curves.items():
        assert rates == curves["steps"], unit


@pytest.mark.parametrize("kind", ["constant", "inverse-sqrt"])
def test_a_warm_up_is_the_same_in_every_unit(kind: str) -> None:
    first, *others = (
        curve(f"type={kind}", f"warmup={warmup}")
        for warmup in ("40 steps", "480 samples", "61.44k tokens", "0.2")
    )
    assert all(rates == first for rates in others)


def test_inverse_sqrt_never_falls_below_its_lowest_rate() -> None:
    made = schedule("type=inverse-sqrt", "warmup=2 steps", "min_lr=5e-4")
    rates = [rate(made, step) for step in range(2, 5000, 7)]
    assert rates == sorted(rates, reverse=True)
    assert min(rates) >= 5e-4


def restarts(cycles: int) -> list[float]:
    """The first rate of every cycle, each of four steps."""
    spans = (f"cycles={cycles}", f"decay={cycles * 4} steps", "warmup=0.0")
    made = schedule("type=cosine-restarts", *spans)
    return [rate(made, 4 * cycle) for cycle in range(cycles)]


@pytest.mark.parametrize("cycles", [1, 2, 3, 7, 10])
def test_every_cycle_begins_at_the_peak(cycles: int) -> None:
    assert restarts(cycles) == [pytest.approx(PEAK)] * cycles


@pytest.mark.parametrize("cycles", [22, 23, 26, 39])
def test_many_cycles_begin_at_the_peak(cycles: int) -> None:
    assert restarts(cycles) == [pytest.approx(PEAK)] * cycles


def test_the_rate_is_set_on_every_group_with_its_factor() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr_factor": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=7.0)
    made = schedule("type=linear", "warmup=20 steps")
    assert made.apply(optimizer, Progress(9, 9 * BATCH, 0)) == pytest.approx(PEAK / 2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([PEAK / 2, PEAK / 4])


# ------------------------------------------------------------------ a batch that grows

RAMP = ("train.ramp.start=4", "train.ramp.by=4", "train.ramp.over=100 steps")
"""50 steps of 4, 50 of 8, 100 of 12."""


def growing(*words: str) -> tuple[Schedule, list[Progress]]:
    """A schedule and the progress before each step of its run."""
    config = load_text(RUN, (*RAMP, *words), place="run.toml")
    numbers = resolve(config, vocab=300)
    return build_schedule(config, numbers), [numbers.progress_at(step) for step in range(STEPS)]


def test_a_warm_up_over_growing_steps_ends_with_the_full_rate() -> None:
    """60 steps have 50 x 4 + 10 x 8 samples."""
    made, moments = growing("schedule.type=constant", "schedule.warmup=60 steps")
    assert made.warmup == 280
    rates = [made.rate(moment) for moment in moments]
    assert rates[0] == pytest.approx(PEAK * 4 / 280)
    assert rates[49] == pytest.approx(PEAK * 200 / 280)
    assert rates[50] == pytest.approx(PEAK * 208 / 280)
    assert rates[58] < PEAK
    assert rates[59:] == [PEAK] * (STEPS - 59)


def test_a_final_decay_in_steps_is_that_of_the_last_steps() -> None:
    made, moments = growing(
        "schedule.type=warmup-stable-decay", "schedule.warmup=0.0", "schedule.decay=120 steps"
    )
    rates = [made.rate(moment) for moment in moments]
    assert rates[:81] == [PEAK] * 81
    length = 20 * 8 + 100 * 12
    for step, done in ((81, 8), (100, 160), (101, 172), (199, 160 + 99 * 12)):
        assert rates[step] == pytest.approx(PEAK * (1 - done / length))


def test_nothing_but_the_time_in_samples_counts_for_the_rate() -> None:
    """The same samples give the same rate, however many steps they took."""
    made, moments = growing("schedule.warmup=0.0", "train.until=1800 samples")
    config = load_text(RUN, ("schedule.warmup=0.0", "train.until=1800 samples"), place="run.toml")
    plain = build_schedule(config, resolve(config, vocab=300))
    for moment in moments:
        assert made.rate(moment) == plain.rate(moment)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_rate_may_grow_with_the_batch(power: float) -> None:
    words = ("schedule.type=linear", "schedule.min_lr=1e-4", "schedule.warmup=20 steps")
    plain, moments = growing(*words)
    scaled, _ = growing(*words, f"train.ramp.lr_power={power}")
    factors = [(1 / 3) ** power] * 50 + [(2 / 3) ** power] * 50 + [1.0] * 100
    for moment, factor in zip(moments, factors, strict=True):
        assert scaled.rate(moment) == pytest.approx(factor * plain.rate(moment), rel=1e-12)
    assert [scaled.rate(m) for m in moments[100:]] == [plain.rate(m) for m in moments[100:]]
