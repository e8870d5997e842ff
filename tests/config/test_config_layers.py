"""Which setting wins, and that a written run file is the run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.base.errors import UserError
from gristmill.base.units import Duration, Unit, parse_split, split_shares
from gristmill.config.load import changed_settings, dump_run, load_preset, load_text, preset_names
from gristmill.config.optim import (
    AccumAdamWConfig,
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    MuonConfig,
)
from gristmill.config.resolve import resolve
from gristmill.config.rules import config_warnings
from gristmill.config.schema import RunConfig, SampleConfig

BASE = """\
name = "trial"
preset = "gpt2-small"

[data]
paths = "tokens/books"

[train]
until = "100 steps"
batch = 12
"""


def load(added: str = "", *words: str) -> RunConfig:
    return load_text(BASE + added, words, place="run.toml")


# ------------------------------------------------------------------ layers


def test_defaults_then_preset_then_file_then_command_line() -> None:
    plain = load()
    assert plain.optim == AdamWConfig()
    assert (plain.model.layers, plain.model.width) == (12, 768)
    filed = load("[model]\nlayers = 6\n[optim]\nlr = 1e-3\n")
    assert (filed.model.layers, filed.model.width, filed.optim.lr) == (6, 768, 1e-3)
    assert filed.optim.beta2 == AdamWConfig().beta2
    typed = load("[model]\nlayers = 6\n[optim]\nlr = 1e-3\n", "model.layers=3", "optim.lr=2e-3")
    assert (typed.model.layers, typed.model.width, typed.optim.lr) == (3, 768, 2e-3)


def test_a_preset_is_chosen_by_the_command_line_first() -> None:
    assert load("", "preset=gpt2-nano").model.width == 128
    assert load("", "preset=gpt2-nano", "preset=gpt2-medium").model.width == 1024
    assert load("", "preset=gpt2-nano").preset == "gpt2-nano"


def test_the_last_word_of_a_setting_wins() -> None:
    assert load("", "train.seed=1", "train.seed=2").train.seed == 2


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.until=20k steps", Duration(20_000, Unit.STEPS)),
        ('train.until="20k steps"', Duration(20_000, Unit.STEPS)),
        ("train.until=3B tokens", Duration(3 * 10**9, Unit.TOKENS)),
        ("train.time_limit=3h30m", "3h30m"),
        ("data.paths=tokens/more=and.less", "tokens/more=and.less"),
        ("data.split=969,30,1", "969,30,1"),
        ("model.tie_head=false", False),
        ("optim.lr=1", 1.0),
        ("runtime.device=cpu", "cpu"),
        ("validate.windows=7", 7),
    ],
)
def test_words_need_no_quotes(word: str, expected: object) -> None:
    table, key = word.split("=")[0].split(".")
    settings = getattr(load("", word), {"validate": "validation"}.get(table, table))
    assert getattr(settings, key) == expected


def test_another_schedule_drops_the_fields_of_the_one_in_the_file() -> None:
    file = '[schedule]\ntype = "cosine"\nwarmup = "5 steps"\nmin_lr = 1e-5\ndecay = "50 steps"\n'
    assert load(file).schedule == CosineSchedule(
        warmup=Duration(5, Unit.STEPS), min_lr=1e-5, decay=Duration(50, Unit.STEPS)
    )
    assert load(file, "schedule.type=constant").schedule == ConstantSchedule()
    assert load(file, "schedule.type=linear", "schedule.min_lr=2e-5").schedule == LinearSchedule(
        min_lr=2e-5
    )


def test_the_same_schedule_keeps_the_fields_of_the_file() -> None:
    file = '[schedule]\ntype = "cosine"\nwarmup = "5 steps"\nmin_lr = 1e-5\n'
    schedule = load(file, "schedule.type=cosine", "schedule.min_lr=2e-5").schedule
    assert schedule == CosineSchedule(warmup=Duration(5, Unit.STEPS), min_lr=2e-5)


def test_the_order_of_words_does_not_matter() -> None:
    file = '[schedule]\ntype = "cosine"\n'
    schedule = load(file, "schedule.min_lr=2e-5", "schedule.type=linear").schedule
    assert schedule == LinearSchedule(min_lr=2e-5)


def test_a_table_without_a_type_has_the_default() -> None:
    optim = load("[optim]\nlr = 6e-4\n", "optim.type=muon").optim
    assert optim == MuonConfig()  # AdamW's rate is not Muon's


def test_kinds_of_adam_take_over_each_others_settings() -> None:
    file = "[optim]\nlr = 3e-3\nbeta1 = 0.8\n"
    optim = load(file, "optim.type=accum-adamw", "optim.accum=8").optim
    assert optim == AccumAdamWConfig(lr=3e-3, beta1=0.8, accum=8)


def test_presets_are_listed_by_family_and_size() -> None:
    names = preset_names()
    assert names[:3] == ["gpt2-nano", "gpt2-small", "gpt2-medium"]
    widths = [load_preset(name)["model"]["width"] for name in names if name.startswith("gpt3")]
    assert len(widths) == 8 and widths == sorted(widths)


# ------------------------------------------------------------------ frozen


@pytest.mark.parametrize(
    ("table", "key"), [(None, "name"), ("train", "batch"), ("optim", "lr"), ("schedule", "warmup")]
)
def test_settings_cannot_be_assigned(table: str | None, key: str) -> None:
    config = load()
    settings: Any = getattr(config, table) if table else config
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, key, getattr(settings, key))


# ------------------------------------------------------------------ writing and reading again

FRACTIONS = st.floats(0, 1, exclude_max=True)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
INTERVALS = st.builds(
    lambda number, size, unit: f"{number}{size} {unit}",
    st.integers(1, 999),
    st.sampled_from(["", "k", "M"]),
    st.sampled_from(["steps", "samples"]),
)
WEIGHTS = st.dictionaries(st.text(), st.floats(1e-300, 1e300), min_size=1, max_size=3)
TABLES = st.fixed_dictionaries(
    {
        "name": NAMES,
        "preset": st.sampled_from(["gpt2-nano", "gpt3-7.5b"]),
        "data": st.fixed_dictionaries(
            {"paths": st.text(min_size=1) | WEIGHTS},
            optional={"tokenizer": st.text(), "order": st.sampled_from(["shuffled", "random"])},
        ),
        "train": st.fixed_dictionaries(
            {"until": INTERVALS, "batch": st.integers(1, 10**6)},
            optional={"seed": st.integers(0, 2**63 - 1), "clip": st.floats(0, 1e9)},
        ),
    },
    optional={
        "optim": st.fixed_dictionaries(
            {}, optional={"lr": st.floats(1e-300, 1e300), "beta1": FRACTIONS, "beta2": FRACTIONS}
        ),
        "schedule": st.one_of(
            st.just({"type": "constant"}),
            st.fixed_dictionaries(
                {"type": st.just("polynomial"), "power": st.floats(0.1, 9)},
                optional={"warmup": FRACTIONS.filter(lambda part: part < 0.5)},
            ),
        ),
        "model": st.fixed_dictionaries({}, optional={"dropout": FRACTIONS, "bias": st.booleans()}),
        "precision": st.just({"compute": "fp16", "loss_scale": {"window": 7}}),
        "validate": st.fixed_dictionaries({"every": INTERVALS}),
        "checkpoint": st.fixed_dictionaries({"keep": st.integers(2, 9)}),
        "sample": st.fixed_dictionaries(
            {"every": INTERVALS, "prompts": st.lists(st.text(), min_size=1, max_size=3)}
        ),
    },
)


@given(TABLES)
def test_a_written_run_is_the_run(tables: dict[str, Any]) -> None:
    config = load_text(tomli_w.dumps(tables), place="run.toml")
    text = dump_run(config)
    again = load_text(text, place="run.toml")
    assert again.preset is None
    assert again == config.model_copy(update={"preset": None})
    assert dump_run(again) == text.split("\n", 1)[1]


def test_a_written_run_names_its_preset_in_a_comment_only() -> None:
    text = dump_run(load())
    assert text.startswith("# made from preset gpt2-small\n")
    assert "preset" not in tomllib.loads(text)
    assert tomllib.loads(text)["model"]["width"] == 768


def test_a_written_run_leaves_out_what_is_not_set() -> None:
    tables = tomllib.loads(dump_run(load()))
    assert "rotary_base" not in tables["model"]
    assert "loss_scale" not in tables["precision"]
    assert "sample" not in tables
    assert "validation" not in tables and tables["validate"] == {"windows": 128}


@pytest.mark.parametrize("until", ["1234567 samples", "1001 steps", "1000000001 steps"])
def test_a_written_run_keeps_every_digit_of_its_horizon(until: str) -> None:
    config = load("", f"train.until={until}")
    again = load_text(dump_run(config), place="run.toml")
    assert again.train.until == config.train.until == Duration.parse(until)


def test_changed_settings_are_told_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    before = load()
    file.write_text(dump_run(before))
    assert changed_settings(file, before) == []
    after = load("", "optim.lr=1e-3", "train.micro_batch=4")
    assert changed_settings(file, after) == [
        "optim.lr from 0.0006 to 0.001",
        "train.micro_batch from None to 4",
    ]


# ------------------------------------------------------------------ numbers that follow


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.batch=12"], (12, 12, 1)),
        (["train.batch=12", "train.micro_batch=4"], (12, 4, 3)),
        (["train.batch=12", "train.accumulate=4"], (12, 3, 4)),
        (["train.batch=12", "train.micro_batch=2", "train.accumulate=6"], (12, 2, 6)),
    ],
)
def test_portions_of_the_batch(words: list[str], expected: tuple[int, int, int]) -> None:
    numbers = resolve(load("", *words), vocab=50257)
    assert (numbers.batch, numbers.micro_batch, numbers.accumulate) == expected


def test_a_micro_batch_alone_is_the_batch() -> None:
    text = BASE.replace("batch = 12", "micro_batch = 3\naccumulate = 5")
    numbers = resolve(load_text(text, place="run.toml"), vocab=50257)
    assert (numbers.batch, numbers.micro_batch, numbers.accumulate) == (15, 3, 5)


@pytest.mark.parametrize(
    ("until", "steps"),
    [
        ("100 steps", 100),
        ("1200 samples", 100),
        ("1201 samples", 101),
        ("12288B tokens", 10**9),
        ("1.2288M tokens", 100),
    ],
)
def test_the_horizon_in_steps(until: str, steps: int) -> None:
    numbers = resolve(load("", f"train.until={until}"), vocab=50257)
    assert numbers.steps == steps
    assert numbers.samples == steps * 12
    assert numbers.progress_at(steps).tokens == steps * 12 * 1024 == steps * numbers.tokens_per_step


def test_the_vocabulary_is_padded() -> None:
    assert resolve(load(), vocab=50257).padded_vocab == 50304
    assert resolve(load("", "model.vocab_multiple=1"), vocab=50257).padded_vocab == 50257
    assert resolve(load("", "model.vocab=300"), vocab=50257).vocab == 300


def test_the_vocabulary_is_sampled_if_it_is_larger_and_whole() -> None:
    def sampled(*words: str, vocab: int = 50257) -> int | None:
        found = load("", "train.sampled_softmax=16384", *words)
        return resolve(found, vocab=vocab).sampled_softmax

    assert sampled() == 16384
    assert sampled(vocab=16385) == 16384
    assert sampled(vocab=16384) is None
    assert sampled("parallel.tp=2") is None
    assert sampled('runtime.device="xla"') is None


def test_intervals_that_are_not_given_follow_the_horizon() -> None:
    def validates(*words: str) -> str:
        return str(resolve(load("", "train.batch=32", *words), vocab=1).validate_every)

    assert validates("train.until=1000 steps") == "50 steps"
    # 128 windows take as long as 4 / 3 steps, and validation an eighth of the time at most.
    assert validates("train.until=3 steps") == "11 steps"
    assert validates("train.until=1000 steps", "train.batch=4") == "86 steps"
    assert validates("train.until=20 steps", "validate.windows=10") == "1 steps"
    assert validates("train.until=3 steps", "validate.every=7 samples") == "7 samples"


def test_a_span_is_the_same_in_every_unit() -> None:
    numbers = resolve(load(), vocab=1)
    spans = [
        Duration(25, Unit.STEPS),
        Duration(25 * 12, Unit.SAMPLES),
        Duration(25 * 12 * 1024, Unit.TOKENS),
        0.25,
    ]
    assert {numbers.samples_of(span) for span in spans} == {300}


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=3))
def test_a_split_is_fractions_of_one(parts: list[int]) -> None:
    fractions = parse_split(",".join(map(str, parts)))
    if parts[0] == 0:
        assert fractions is None
    else:
        assert fractions == pytest.approx([part / sum(parts) for part in parts])
        assert sum(fractions) == pytest.approx(1)


def test_a_split_has_colons_or_commas() -> None:
    shares = [949.0, 50.0, 1.0]
    for text in ("949,50,1", "949:50:1", "949, 50, 1", " 949 : 50 : 1 "):
        assert split_shares(text) == shares, text
    for text in ("949:50,1", "949;50;1", "949::50", ":", "949:"):
        assert split_shares(text) is None, text


@pytest.mark.parametrize(("split", "warned"), [("100,0", True), ("1:0:1", True), ("9:1", False)])
def test_validation_without_text_is_a_doubt(split: str, warned: bool) -> None:
    asked = load("", f'data.split="{split}"', "validate.windows=8")
    found = [
        one for one in config_warnings(asked, resolve(asked, vocab=257)) if "is validated" in one
    ]
    assert len(found) == warned
    assert all(f'data.split = "{split}" holds nothing out' in one for one in found)
    silent = load("", f'data.split="{split}"')
    assert config_warnings(silent, resolve(silent, vocab=257)) == []


def test_samples_are_off_unless_asked_for() -> None:
    assert load().sample is None
    assert load("", "sample.every=10 steps").sample == SampleConfig(
        every=Duration(10, Unit.STEPS), prompts=("",)
    )


# ------------------------------------------------------------------ paths with weights


def test_paths_may_be_one_or_several_with_or_without_weights() -> None:
    def paths(text: str, *words: str) -> object:
        return load_text(f"{BLEND}\n[data]\npaths = {text}\n", words, place="run.toml").data.paths

    assert paths('"tokens/web"') == "tokens/web"
    assert paths('["tokens/web", "tokens/books"]') == ("tokens/web", "tokens/books")
    assert paths('{ "tokens/web" = 9, b = 0.5 }') == {"tokens/web": 9.0, "b": 0.5}
    assert paths("{ a = 1 }", "data.paths={b=2}") == {"b": 2.0}
    assert paths("{ a = 1 }", 'data.paths=["b"]') == ("b",)
    assert paths('["b"]', "data.paths={b=2}") == {"b": 2.0}


@pytest.mark.parametrize(
    "text",
    ['["a", "b"]', '{ "tokens/web.v2" = 9, b = 0.5 }', '{ "\U0001f33e" = 1, "a\\n" = 2e-5 }'],
)
def test_paths_are_written_as_they_were_read(text: str) -> None:
    config = load_text(f"{BLEND}\n[data]\npaths = {text}\n", place="run.toml")
    again = load_text(dump_run(config), place="again")
    assert again.data == config.data


BLEND = """\
name = "trial"
preset = "gpt2-nano"
train.until = "100 steps"
train.batch = 12
"""


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((), 1200),
        (('train.until="1000 samples"',), 1000),
        (('train.until="100k tokens"', "data.sequence=100"), 1008),
        (("data.order=megatron", "data.samples=77"), 77),
    ],
)
def test_megatrons_order_is_made_for_the_samples_of_the_run(
    words: tuple[str, ...], asked: int
) -> None:
    config = load_text(f'{BLEND}\n[data]\npaths = "a"\n', words, place="run.toml")
    assert resolve(config, vocab=10).asked_samples == asked


def test_the_order_has_the_seed_of_the_run_unless_it_has_its_own() -> None:
    text = f'{BLEND}\n[data]\npaths = "a"\n'
    assert resolve(load_text(text, place="run.toml"), vocab=10).data_seed == 1337
    own = load_text(text, ("data.seed=1234",), place="run.toml")
    assert resolve(own, vocab=10).data_seed == 1234


# ------------------------------------------------------------------ old names

OLD_NAMES = """
name = "old"
model = { layers = 1, heads = 1, width = 8, context = 8 }
data.paths = "none"
[train]
until = "10 steps"
batch = 1
"""
NOTE = "train.second_token is now called train.mtp"


def test_an_old_name_is_read_and_the_new_one_is_told(tmp_path: Path) -> None:
    in_file = load_text(OLD_NAMES + "second_token = 0.5\n", place="run.toml")
    typed = load_text(OLD_NAMES, ["train.second_token=0.5"], place="run.toml")
    now = load_text(OLD_NAMES + "mtp = 0.5\n", place="run.toml")
    assert in_file.train.mtp == typed.train.mtp == 0.5
    assert in_file.old_names == typed.old_names == (NOTE,)
    assert now.old_names == ()
    assert "mtp = 0.5" in dump_run(in_file) and "second_token" not in dump_run(in_file)
    (file := tmp_path / "run.toml").write_text(dump_run(now).replace("mtp =", "second_token ="))
    assert changed_settings(file, now) == []


def test_the_command_line_changes_what_a_file_gives_by_its_old_name() -> None:
    words = (["train.mtp=0.25"], ["train.second_token=0.25"])
    for word in words:
        config = load_text(OLD_NAMES + "second_token = 0.5\n", word, place="run.toml")
        assert config.train.mtp == 0.25


def test_a_wrong_value_of_an_old_name_is_told_with_its_line() -> None:
    with pytest.raises(UserError, match=r"run\.toml:8: train\.mtp"):
        load_text(OLD_NAMES + "second_token = -1.0\n", place="run.toml")
    with pytest.raises(UserError, match=r"command line 'train\.second_token=-1\.0': train\.mtp"):
        load_text(OLD_NAMES, ["train.second_token=-1.0"], place="run.toml")


def test_a_file_gives_a_setting_by_one_name() -> None:
    with pytest.raises(UserError, match=r"run\.toml:8: .*is the old name of train\.mtp"):
        load_text(OLD_NAMES + "second_token = 0.5\nmtp = 0.5\n", place="run.toml")
