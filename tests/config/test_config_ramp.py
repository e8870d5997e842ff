"""A batch that grows, from the run file to numbers: what follows from it, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import Duration, Progress, Unit
from gristmill.config.load import dump_run, load_text
from gristmill.config.resolve import Resolved, resolve
from gristmill.config.rules import check_mesh

BASE = """\
name = "trial"
preset = "gpt2-nano"

[data]
paths = "tokens/books"
sequence = 10

[train]
until = "300 steps"
batch = 48
"""
RAMP = """
[train.ramp]
start = 16
by = 16
over = "200 steps"
"""


def numbers(*words: str, ramp: str = RAMP) -> Resolved:
    return resolve(load_text(BASE + ramp, words, place="run.toml"), vocab=300)


def complaint(*words: str, added: str = RAMP, base: str = BASE) -> UserError:
    with pytest.raises(UserError) as caught:
        load_text(base + added, words, place="run.toml")
    assert caught.value.exit is Exit.CONFIG
    return caught.value


def batches(of: Resolved) -> list[int]:
    """The batch of every step of the run."""
    ends = [of.progress_at(step).samples for step in range(of.steps + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def test_thirds_of_the_run() -> None:
    thirds = [16] * 100 + [32] * 100 + [48] * 100
    assert batches(numbers()) == thirds
    assert batches(numbers("train.ramp.over=0.6667")) == thirds
    assert numbers().samples == sum(thirds) == 9600
    assert numbers().progress_at(250) == Progress(250, 7200, 72_000)


def test_a_fraction_is_one_of_the_horizon_in_its_own_unit() -> None:
    in_samples = numbers("train.until=9600 samples", "train.ramp.over=0.5")
    assert in_samples.ramp == numbers("train.ramp.over=4800 samples").ramp
    in_tokens = numbers("train.until=96k tokens", "train.ramp.over=0.5")
    assert in_tokens.ramp == numbers("train.ramp.over=48k tokens").ramp == in_samples.ramp
    in_steps = numbers("train.ramp.over=0.5")
    assert in_steps.ramp == numbers("train.ramp.over=150 steps").ramp != in_samples.ramp


@pytest.mark.parametrize(
    ("until", "steps"),
    [
        ("300 steps", 300),
        ("9600 samples", 300),
        ("9553 samples", 300),
        ("9552 samples", 299),
        ("96k tokens", 300),
        ("95521 tokens", 300),
        ("95520 tokens", 299),
    ],
)
def test_the_horizon_counts_real_steps(until: str, steps: int) -> None:
    found = numbers(f"train.until={until}")
    assert found.steps == steps
    horizon = Duration.parse(until)
    assert found.progress_at(steps).reached(horizon)
    assert not found.progress_at(steps - 1).reached(horizon)


def test_spans_in_steps_are_as_long_as_the_steps_in_them() -> None:
    found = numbers()
    assert found.samples_of(Duration(150, Unit.STEPS)) == 100 * 16 + 50 * 32
    assert found.samples_of(Duration(400, Unit.STEPS)) == 9600 + 100 * 48
    assert found.samples_of(Duration(7, Unit.SAMPLES)) == 7
    assert found.samples_of(Duration(71, Unit.TOKENS)) == 8
    assert found.samples_of(0.5) == 4800
    assert found.last_samples_of(Duration(150, Unit.STEPS)) == 100 * 48 + 50 * 32
    assert found.last_samples_of(Duration(300, Unit.STEPS)) == 9600
    assert found.last_samples_of(Duration(301, Unit.STEPS)) == 9648
    assert found.last_samples_of(Duration(7, Unit.SAMPLES)) == 7
    assert found.last_samples_of(0.5) == 4800


@pytest.mark.parametrize("steps", [0, 1, 99, 299, 300, 301, 1000])
def test_without_a_ramp_the_last_steps_are_as_long_as_the_first(steps: int) -> None:
    found = numbers(ramp="")
    span = Duration(steps, Unit.STEPS)
    assert found.last_samples_of(span) == found.samples_of(span) == steps * 48


def test_the_end_of_the_run_from_where_it_is() -> None:
    found = numbers()
    assert found.samples_at_end(Progress()) == 9600
    assert found.samples_at_end(found.progress_at(150)) == 9600
    assert found.samples_at_end(found.progress_at(300)) == 9600
    # A run that had only full steps so far, and was then given a ramp that is over by now.
    assert found.samples_at_end(Progress(250, 250 * 48, 0)) == 300 * 48
    assert found.samples_at_end(Progress(301, 14_448, 0)) == 14_448


def test_megatrons_order_and_the_intervals_follow_the_growing_steps() -> None:
    found = numbers("data.order=megatron")
    assert found.asked_samples == 9600
    assert str(found.validate_every) == "15 steps"
    assert numbers("train.until=9590 samples").asked_samples == 9590


@pytest.mark.parametrize(
    ("words", "portions"),
    [
        ([], (16, 3)),
        (["train.ramp.start=24", "train.ramp.by=12"], (12, 4)),
        (["train.micro_batch=8"], (8, 6)),
        (["train.accumulate=6"], (8, 6)),
        (["train.accumulate=3", "train.micro_batch=16"], (16, 3)),
    ],
)
def test_the_micro_batch_divides_every_batch_of_the_ramp(
    words: list[str], portions: tuple[int, int]
) -> None:
    found = numbers(*words)
    assert (found.micro_batch, found.accumulate) == portions
    assert found.batch == found.ramp.full == 48
    assert all(step.batch % found.micro_batch == 0 for step in found.ramp.ramp_steps)


def test_the_ramp_does_not_depend_on_the_micro_batch() -> None:
    assert numbers().ramp == numbers("train.micro_batch=2").ramp


@pytest.mark.parametrize("over", ["0.25", "20k tokens", "1 steps"])
def test_a_written_ramp_reads_back(over: str) -> None:
    words = (f"train.ramp.over={over}", "train.ramp.lr_power=0.5")
    config = load_text(BASE + RAMP, words, place="run.toml")
    assert load_text(dump_run(config), place="again").train == config.train
    assert "ramp" not in dump_run(load_text(BASE, place="run.toml"))


# ------------------------------------------------------------------ refused

MISTAKES = {
    "not smaller at first": (
        ["train.ramp.start=48"],
        "command line 'train.ramp.start=48': train.ramp.start: 48 is not below the full batch 48\n"
        "    the batch grows from train.ramp.start to train.batch",
    ),
    "never meets the batch": (
        ["train.ramp.by=10"],
        "train.ramp.by: growing by 10, a batch of 16 never reaches 48\n    by could be 4, 8, 16",
    ),
    "indivisible micro-batch": (
        ["train.micro_batch=12"],
        "train.micro_batch: the ramp's batch of 16 is not a multiple of micro_batch 12\n"
        "    micro_batch could be 4, 8, 16",
    ),
    "indivisible by accumulation": (
        ["train.accumulate=2"],
        "train.accumulate: the ramp's batch of 16 is not a multiple of micro_batch 24\n"
        "    accumulate could be 3, 6, 12",
    ),
    "a later stage is indivisible": (
        ["train.ramp.start=24", "train.ramp.by=12", "train.micro_batch=24"],
        "train.micro_batch: the ramp's batch of 36 is not a multiple of micro_batch 24\n"
        "    micro_batch could be 4, 6, 12",
    ),
    "no length": (
        ["train.ramp.over=0 steps"],
        "train.ramp.over: must be above 0\n    or leave the ramp out",
    ),
    "no fraction": (["train.ramp.over=0.0"], "train.ramp.over: must be above 0\n"),
    "longer than the run in steps": (
        ["train.ramp.over=300 steps"],
        "train.ramp.over: the full batch comes after sample 7200, and the run ends at sample 7200\n"
        "    shorten it, or raise train.until",
    ),
    "longer than the run in samples": (
        ["train.until=1000 samples", "train.ramp.over=2k samples"],
        "the full batch comes after sample 2000, and the run ends at sample 1008",
    ),
    "no unit": (["train.ramp.over=5"], "a plain number is a fraction of the run"),
    "a negative power": (["train.ramp.lr_power=-1"], "train.ramp.lr_power: "),
    "final decay in large steps": (
        ["schedule.type=warmup-stable-decay", "schedule.warmup=0.3", "schedule.decay=200 steps"],
        "schedule.decay: warm-up and decay together are longer than the run",
    ),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_ramp_that_does_not_fit_is_refused(words: list[str], message: str) -> None:
    error = complaint(*words)
    assert message in str(error)
    assert len(error.problems) == 1


def test_the_place_of_a_mistake_is_its_line() -> None:
    error = complaint(added=RAMP.replace("by = 16", "by = 9"))
    assert str(error).startswith("run.toml:14: train.ramp.by: ")


def test_all_of_a_ramp_must_be_given() -> None:
    error = complaint(added="\n[train.ramp]\nstart = 16\n")
    assert [problem.where for problem in error.problems] == [
        "run.toml:13: train.ramp.by",
        "run.toml:13: train.ramp.over",
    ]


def test_a_ramp_up_to_a_batch_that_is_not_right_is_one_mistake() -> None:
    error = complaint("train.micro_batch=7")
    assert len(error.problems) == 1
    assert "batch 48 is not a multiple of micro_batch 7" in str(error)
    error = complaint(base=BASE.replace("batch = 48\n", ""))
    assert len(error.problems) == 1
    assert "the batch size is not given" in str(error)


# ------------------------------------------------------------------ on several processes

PIPELINE = ("parallel.pp=2", "train.micro_batch=2")
DIVIDED = {
    "no micro-batch for the second stage": (
        (*PIPELINE, "train.batch=8", "train.ramp.start=2", "train.ramp.by=2"),
        2,
        "train.ramp.start: 1f1b needs at least 2 micro-batches in a step, not 1 as in the ramp's "
        "batch of 2\n    start could be 4, 6",
    ),
    "an odd batch in between": (
        (
            *PIPELINE,
            "parallel.schedule=interleaved",
            "train.batch=12",
            "train.ramp.start=8",
            "train.ramp.by=2",
        ),
        2,
        "train.ramp.by: interleaved needs a multiple of 2 micro-batches in a step, not 5 as in "
        "the ramp's batch of 10\n    start and by could be multiples of 4",
    ),
    "odd batches from the beginning": (
        (
            *PIPELINE,
            "parallel.schedule=interleaved",
            "parallel.dp_shard=2",
            "train.batch=48",
            "train.ramp.start=12",
            "train.ramp.by=12",
        ),
        4,
        "train.ramp.start: interleaved needs a multiple of 2 micro-batches in a step, not 3 as in "
        "the ramp's batch of 12\n"
        "    start and by could be multiples of 8",
    ),
    "start and by": (
        (
            *PIPELINE,
            "parallel.schedule=zero-bubble",
            "train.micro_batch=1",
            "train.batch=12",
            "train.ramp.start=1",
            "train.ramp.by=1",
        ),
        2,
        "not 1 as in the ramp's batch of 1\n    start and by could be multiples of 2",
    ),
    "no room to grow": (
        ("parallel.pp=2", "train.batch=2", "train.ramp.start=1", "train.ramp.by=1"),
        2,
        "not 1 as in the ramp's batch of 1\n    leave the ramp out",
    ),
    "among processes": (
        ("train.ramp.start=16", "train.ramp.by=16"),
        3,
        "train.ramp.start: the ramp's batch of 16 cannot be divided among 3 data-parallel processes"
        "\n    start and by could be multiples of 3",
    ),
    "each process's portions": (
        ("train.micro_batch=8", "train.batch=64"),
        4,
        "train.micro_batch: each process's 4 samples of the ramp's batch of 16 are not a multiple "
        "of micro_batch 8\n    micro_batch could be 1, 2, 4",
    ),
}


@pytest.mark.parametrize(("words", "processes", "message"), DIVIDED.values(), ids=DIVIDED.keys())
def test_every_batch_of_a_ramp_must_fit_the_processes(
    words: tuple[str, ...], processes: int, message: str
) -> None:
    config = load_text(BASE + RAMP, words, place="run.toml")
    with pytest.raises(UserError) as error:
        check_mesh(config, processes=processes)
    assert message in str(error.value)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no micro-batch for the second stage", ("train.ramp.start=4",)),
        ("no micro-batch for the second stage", ("train.ramp.start=6",)),
        ("an odd batch in between", ("train.ramp.by=4",)),
        ("odd batches from the beginning", ("train.ramp.start=8", "train.ramp.by=8")),
        ("start and by", ("train.ramp.start=2", "train.ramp.by=2")),
        ("each process's portions", ("train.micro_batch=4",)),
    ],
)
def test_what_is_suggested_for_a_ramp_is_not_refused(name: str, words: tuple[str, ...]) -> None:
    refused, processes, _ = DIVIDED[name]
    config = load_text(BASE + RAMP, (*refused, *words), place="run.toml")
    assert check_mesh(config, processes=processes).processes == processes
