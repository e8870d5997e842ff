"""Runs whose mixture changes: what they read, what they record of it, and how they go on."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.data.dataset import open_data
from gristmill.data.loader import Loader
from gristmill.text.prepare.prepare import prepare, prepare_documents
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StepRecord, ValidationRecord
from gristmill.track.requests import RunRequest
from gristmill.train.assemble import assemble, build_loader
from gristmill.train.order import order_problem
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

Crowd = Callable[..., list[Any]]
FORMATS = {"web": "flat", "code": "megatron", "math": "llmc", "held": "npy"}
RUN = """
name = "mixed"
folder = "{folder}"
preset = "gpt2-nano"
model = {{ layers = 2, width = 16, heads = 2, context = 16 }}
train = {{ until = "40 steps", batch = 12 }}
optim.lr = 1e-3
runtime = {{ device = "cpu", compile = false, threads = 1 }}
parallel.timeout = "60s"
[data]
paths = ["{sets}/web", "{sets}/code", "{sets}/math"]
split = "9,1"
max_epochs = {{ code = 2 }}
[[data.stage]]
to = 0.5
weights = {{ web = 0.6, code = 0.4 }}
[[data.stage]]
gradual = true
weights = {{ web = 0.3, math = 0.5, code = 0.2 }}
[[validate.set]]
name = "all"
data = ["{sets}/held", "{sets}/code"]
windows = 7
[[validate.set]]
name = "held"
data = "{sets}/held"
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token sets of four formats, code being so small that it runs dry."""
    folder, random_ = tmp_path_factory.mktemp("sets"), random.Random(5)
    letters = {"web": "mil tower", "code": "xyz=+()", "math": "0123456789", "held": "abc xyz 012"}
    for name, format in FORMATS.items():
        count = {"web": 60, "code": 8, "math": 60, "held": 20}[name]
        texts = [
            "".join(random_.choices(letters[name], k=random_.randint(90, 200)))
            for _ in range(count)
        ]
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare(
            PrepareRequest(
                [str(source)], folder / name, open_tokenizer("bytes"), workers=1, format=format
            )
        )
    return folder


@pytest.fixture
def make(sets: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def run(*settings: str, folder: str = "run", text: str = RUN) -> RunConfig:
        text = text.format(folder=tmp_path / folder, sets=sets)
        # The name that Megatron gives its files.
        text = text.replace(f"{sets}/code", f"{sets}/code_text_document")
        return load_text(text, settings, place="run.toml")

    return run


def steps_of(folder: Path) -> list[StepRecord]:
    return [one for one in read_metrics(folder / "metrics.jsonl") if isinstance(one, StepRecord)]


def warnings_of(folder: Path) -> list[str]:
    records = read_metrics(folder / "metrics.jsonl")
    return [one.text for one in records if isinstance(one, EventRecord) and one.level == "warning"]


def loader_of(config: RunConfig, **changes: Any) -> Loader:
    """The loader of a run, without a model."""
    run = assemble(config, RunFolder(Path(str(config.folder))))
    return replace(build_loader(run), **changes)


# ------------------------------------------------------------------ what is read


def test_steps_record_the_losses_and_the_tokens_of_every_source(
    make: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make()
    Run(config).train()
    loader = loader_of(config)
    read = {"web": 0, "code": 0, "math": 0}
    for number, record in enumerate(steps_of(tmp_path / "run")):
        (batch,) = loader.step_batches(12 * number)
        assert batch.sources_B is not None
        drawn = np.bincount(batch.sources_B.numpy(), minlength=3).tolist()
        assert batch.source_tokens_K is not None
        assert batch.source_tokens_K.tolist() == [16.0 * one for one in drawn]
        assert record.sources is not None and list(record.sources) == list(read)
        total = 0.0
        for name, count in zip(read, drawn, strict=True):
            read[name] += 16 * count
            told = record.sources[name]
            assert told["tokens"] == read[name]
            assert (told["loss"] is None) == (count == 0)
            total += count * (told["loss"] or 0.0)
        assert total / 12 == pytest.approx(record.loss, rel=1e-5)
    assert sum(read.values()) == 40 * 12 * 16


def test_a_source_is_read_as_often_as_it_may_be_and_the_log_says_when_that_is(
    make: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make()
    Run(config).train()
    last = steps_of(tmp_path / "run")
    data = open_data(config.data, sequence=16)
    epoch = (len(data.train.splits[1].tokens) - 1) // 16 - 1
    code = [record.sources["code"]["tokens"] for record in last if record.sources]
    assert code[-1] == 2 * epoch * 16  # exactly twice
    dry = next(n for n, tokens in enumerate(code, 1) if tokens == code[-1])
    (text,) = [text for text in warnings_of(tmp_path / "run") if "runs dry" in text]
    told = int(text.split(" at step ")[1].split()[0])
    # It runs dry with the first sample that it cannot give, which comes a little later.
    assert dry <= told <= dry + 1
    assert "it has then been read 2 times, and its share goes to web" in text
    lines = (tmp_path / "run" / "train.log").read_text()
    assert "stage 1 of 2, steps 1 to 20: web" in lines
    # Every sample of the two epochs once each.
    loader = loader_of(config)
    choices = loader.stream.blend
    assert choices is not None
    places = loader.stream.indices[1].spans(np.arange(2 * epoch)).begins
    assert len(set(places[:epoch])) == len(set(places[epoch:])) == epoch


def test_formats_of_all_kinds_mix_with_the_ids_of_each(make: Callable[..., RunConfig]) -> None:
    stream = loader_of(make()).stream
    assert [one.reader.info.format for one in stream.sets] == ["flat", "megatron", "llmc"]
    samples = np.arange(0, 480)
    found = stream.read(samples)
    assert found.sources_B is not None
    seen = [0, 0, 0]
    for number, source in enumerate(found.sources_B.tolist()):
        spans = stream.indices[source].spans(np.array([seen[source]]))
        ids = stream.sets[source].reader.read(int(spans.begins[0]), 17).tolist()
        assert found.ids_BS[number].tolist() == ids
        seen[source] += 1
    assert min(seen) > 0


# ------------------------------------------------------------------ stopping and going on


def test_a_stop_in_the_middle_of_a_stage_changes_no_bit(
    make: Callable[..., RunConfig],
    tmp_path: Path,
    runs: Runs,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Run(make(folder="whole")).train()
    with monkeypatch.context():
        stop_after(27)
        assert Run(make(folder="stopped")).train().exit is Exit.STOPPED
        monkeypatch.undo()
    assert Run(make(folder="stopped")).train().exit is Exit.DONE
    runs.assert_same(tmp_path / "whole", tmp_path / "stopped")


def close(one: float | None, other: float | None) -> bool:
    """Whether two losses agree within rounding, or neither is there."""
    return one == other or (None not in (one, other) and one == pytest.approx(other, rel=1e-4))


def train_here(config: RunConfig) -> int:
    return int(Run(config).train().exit)


def test_three_ranks_go_on_with_the_same_samples_and_losses(
    make: Callable[..., RunConfig],
    tmp_path: Path,
    crowd: Crowd,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From one process with two micro-batches to three with one, in the middle of a gradual
    stage."""
    Run(make(folder="whole")).train()
    stop_after(25)
    assert Run(make("train.accumulate=2", folder="moved")).train().exit is Exit.STOPPED
    monkeypatch.undo()
    three = make("parallel.dp_replicate=3", folder="moved")
    assert crowd(3, train_here, three) == [0, 0, 0]
    whole, moved = steps_of(tmp_path / "whole"), steps_of(tmp_path / "moved")
    assert [one.step for one in moved] == list(range(1, 41))
    for one, other in zip(whole, moved, strict=True):
        assert one.sources is not None and other.sources is not None
        for name, told in one.sources.items():
            assert other.sources[name]["tokens"] == told["tokens"]
            assert close(other.sources[name]["loss"], told["loss"])
        assert close(other.loss, one.loss)
    loader = loader_of(make(folder="whole"))
    ranks = [replace(loader, rank=rank, ranks=3, micro_batch=4) for rank in range(3)]
    for step in range(18, 30):
        (alone,) = loader.step_batches(12 * step)
        shards = [batch.tokens_BT for rank in ranks for batch in rank.step_batches(12 * step)]
        assert torch.cat(shards).equal(alone.tokens_BT)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [(4, "tp=2 parallel.pp=2"), pytest.param(2, "cp=2", marks=pytest.mark.slow)],
)
def test_other_layouts_record_the_same_losses(
    make: Callable[..., RunConfig], tmp_path: Path, crowd: Crowd, processes: int, layout: str
) -> None:
    settings = ('train.until="3 steps"', "train.accumulate=2")
    Run(make(*settings, folder="whole")).train()
    config = make(*settings, *f"parallel.{layout}".split(), folder="other")
    assert crowd(processes, train_here, config) == [0] * processes
    pairs = zip(steps_of(tmp_path / "whole"), steps_of(tmp_path / "other"), strict=True)
    for one, other in pairs:
        assert one.sources is not None and other.sources is not None
        for name, told in one.sources.items():
            assert close(other.sources[name]["loss"], told["loss"])


def test_sampled_softmax_and_packed_documents_have_losses_by_source(
    make: Callable[..., RunConfig], tmp_path: Path
) -> None:
    settings = (
        'train.until="6 steps"', "train.sampled_softmax=64", 'data.documents="masked"',
        "data.mask_end_of_text=true",
    )  # fmt: skip
    config = make(*settings)
    Run(config).train()
    loader, masked = loader_of(config), 0.0
    for number, record in enumerate(steps_of(tmp_path / "run")):
        (batch,) = loader.step_batches(12 * number)
        assert record.sources is not None
        assert batch.source_tokens_K is not None
        counted = batch.source_tokens_K.tolist()
        assert sum(counted) == batch.loss_tokens <= batch.tokens
        masked += batch.tokens - batch.loss_tokens
        total = sum(
            count * (told["loss"] or 0.0)
            for count, told in zip(counted, record.sources.values(), strict=True)
        )
        assert total / batch.loss_tokens == pytest.approx(record.loss, rel=1e-5)
    assert masked > 0


def test_recording_sources_changes_nothing_else(
    make: Callable[..., RunConfig], tmp_path: Path, runs: Runs
) -> None:
    settings = ('train.until="6 steps"',)
    Run(make(*settings, folder="with")).train()
    Run(make(*settings, "track.sources=false", folder="without")).train()
    told, silent = runs.history(tmp_path / "with"), runs.history(tmp_path / "without")
    assert [{k: v for k, v in one.items() if k != "sources"} for one in told] == silent
    left, right = runs.tensors(tmp_path / "with"), runs.tensors(tmp_path / "without")
    assert all(left[name].equal(right[name]) for name in left)


# ------------------------------------------------------------------ changes of the plan


def test_stages_behind_a_run_cannot_be_changed_and_those_ahead_can(
    make: Callable[..., RunConfig], tmp_path: Path, stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stop_after(10)
    Run(make()).train()
    monkeypatch.undo()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"data\.stage \(order\): the 120 samples that are done"):
        Run(make(text=RUN.replace("web = 0.6, code = 0.4", "web = 0.7, code = 0.3"))).train()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    ahead = make(text=RUN.replace("math = 0.5, code = 0.2", "math = 0.6, code = 0.1"))
    assert Run(ahead).train().exit is Exit.DONE


def test_another_horizon_is_refused_where_it_would_change_what_was_read(
    make: Callable[..., RunConfig],
) -> None:
    config = make()
    run = assemble(config, RunFolder(Path(str(config.folder))))

    def problem(until: str, *, samples: int) -> str | None:
        longer = make(f'train.until="{until}"')
        run.state.progress = replace(run.state.progress, samples=samples)
        return order_problem(longer.data, resolve(longer, vocab=257), run.data.train, run.state)

    # In the first stage, which lasts longer then; in the second, which would be less steep.
    assert problem("60 steps", samples=200) is None
    assert "chosen otherwise" in str(problem("60 steps", samples=300))
    assert problem("40 steps", samples=300) is None


def test_a_running_run_can_be_given_another_horizon(
    make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.train.hooks import Hooks

    real, asked = Hooks.after_step, list[int]()

    def ask(self: Hooks, event: Any) -> None:
        if event.after.steps == 8 and not asked:
            asked.append(1)
            self.requests.put(RunRequest("until", until="50 steps"))
        real(self, event)

    monkeypatch.setattr(Hooks, "after_step", ask)
    outcome = Run(make()).train()
    assert outcome.exit is Exit.DONE
    steps = steps_of(tmp_path / "run")
    assert asked and [one.step for one in steps] == list(range(1, 51))
    whole = loader_of(make('train.until="50 steps"'))
    read = whole.stream.taken(50 * 12)
    assert steps[-1].sources is not None
    assert [told["tokens"] for told in steps[-1].sources.values()] == [16 * one for one in read]


# ------------------------------------------------------------------ validation sets


def test_every_set_has_its_loss_in_the_records_and_in_the_log(
    make: Callable[..., RunConfig], tmp_path: Path
) -> None:
    Run(make('train.until="4 steps"', 'validate.every="2 steps"')).train()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = [one for one in records if isinstance(one, ValidationRecord)]
    assert [one.step for one in found] == [0, 2, 4]
    log = (tmp_path / "run" / "train.log").read_text()
    for record in found:
        assert record.sets is not None and list(record.sets) == ["all", "held"]
        assert record.sets["all"]["windows"] == 7
        assert 0 < record.sets["held"]["windows"] <= 128
        for told in record.sets.values():
            assert told["perplexity"] == pytest.approx(math.exp(told["loss"]))
        losses = ", ".join(f"{name} {one['loss']:.4f}" for name, one in record.sets.items())
        assert losses in log


def test_a_set_with_the_text_of_the_main_validation_has_its_loss_and_is_never_the_best(
    make: Callable[..., RunConfig], tmp_path: Path, sets: Path
) -> None:
    text = RUN.replace('split = "9,1"', f'validation = "{sets}/held"')
    Run(make('train.until="4 steps"', 'validate.every="2 steps"', text=text)).train()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for record in records:
        if isinstance(record, ValidationRecord):
            assert record.sets is not None
            same = record.sets["held"]
            assert same["loss"] == record.loss
            assert same["bits_per_byte"] == record.bits_per_byte
            assert same["windows"] == record.windows
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert best["loss"] == min(
        one.loss for one in records if isinstance(one, ValidationRecord) and one.step
    )


def test_a_set_of_another_tokenizer_or_too_little_text_is_refused_before_training(
    make: Callable[..., RunConfig], tmp_path: Path
) -> None:
    short = tmp_path / "short"
    prepare_documents([Document("abc", "1")], tokenizer=open_tokenizer("bytes"), output=short)
    text = RUN.replace('data = "{sets}/held"', f'data = "{short}"')
    with pytest.raises(UserError, match="validation set 'held' has 4 tokens, too few"):
        Run(make(text=text)).train()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("math = 0.5", "maths = 0.5", "there is no source 'maths'"),
        ("web = 0.6, code = 0.4", "web = 0.6, code = 0.3", "add up to 0.9, and must add up to 1"),
        ("web = 0.6, code = 0.4", "web = 1.2, code = -0.2", "must be a number from 0, not -0.2"),
        ("gradual = true", "gradual = true\nfrom = 0.4", "overlaps stage 1"),
        ("gradual = true", "gradual = true\nfrom = 0.6", "nothing is said of the samples 240 to"),
        ("gradual = true", "gradual = true\nto = 0.9", "last stage ends at sample 432, and the"),
        ("to = 0.5", 'to = "50 steps"', "after the run's end at 480"),
        ("to = 0.5\n", "", "nothing says where stage 1 ends"),
        ("to = 0.5", "to = 0.5\ngradual = true", "the first stage has none before it"),
        ("to = 0.5", "to = 0.0", "has no samples"),
        ("code = 2", "cod = 2", "there is no source 'cod'"),
        ("code = 2", "code = 0", "must be a number above 0"),
        ('split = "9,1"', 'split = "9,1"\norder = "megatron"', "mixes its sets in its own way"),
        ('split = "9,1"', 'split = "9,1"\nblend = "proportion"', "has no effect beside data.stage"),
        ('split = "9,1"', 'split = "1,0"', "sets come beside the main validation"),
        ('name = "held"', 'name = "all"', "there are two sets called 'all'"),
        ("[[data.stage]]\nto = 0.5", "[data.stage]\nto = 0.5", ""),
    ],
)
def test_mistakes_are_told_with_their_place(
    make: Callable[..., RunConfig], old: str, new: str, said: str
) -> None:
    assert old in RUN
    with pytest.raises(UserError, match=said or "not valid TOML"):
        make(text=RUN.replace(old, new, 1))


def test_a_single_table_is_told_to_be_a_list(make: Callable[..., RunConfig]) -> None:
    first = RUN.index("[[data.stage]]")
    text = RUN[:first] + "[data.stage]\nweights = {{ web = 1 }}\n"
    with pytest.raises(UserError, match=r"write \[\[data\.stage\]\], with two brackets"):
        make(text=text)


def test_limits_that_leave_nothing_to_read_are_refused_before_training(
    make: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make("data.max_epochs=0.5", 'train.until="400 steps"')
    with pytest.raises(UserError, match=r"in stage \d, nothing is left to read"):
        Run(config).train()
    assert not (tmp_path / "run" / "checkpoints").exists()
