"""From a step of a run to its documents, and from a phrase to the steps that trained on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gristmill import Run
from gristmill.base.errors import UserError
from gristmill.cli.main import app
from gristmill.data.provenance import TokenPlace
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.train.lookup import RunSamples, open_samples

RUN = """
name = "looked-up"
folder = "{folder}"
preset = "gpt2-nano"
model = {{ layers = 1, width = 16, heads = 2, context = 24 }}
data = {data}
train = {{ until = "30 steps", batch = 4 }}
optim.lr = 1e-3
runtime = {{ device = "cpu", compile = false }}
"""
MIXTURES = {
    "the same": """{{ paths = {{ "{a}" = 0.7, "{b}" = 0.3 }}, split = "1,0" }}""",
    "stages": """{{ paths = ["{a}", "{b}"], split = "1,0", max_epochs = {{ set-b = 1.5 }}, stage = [
    {{ to = 0.4, weights = {{ set-a = 0.7, set-b = 0.3 }} }},
    {{ gradual = true, weights = {{ set-a = 0.2, set-b = 0.8 }} }}
] }}""",
}


@pytest.fixture(scope="module", params=MIXTURES)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run on two sets of many short documents, whose mixture stays or changes."""
    root = tmp_path_factory.mktemp("lookup")
    for name, count in (("a", 60), ("b", 40)):
        rows = [json.dumps({"text": f"{name}{number}: the mill turns"}) for number in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        sources = [str(root / f"{name}.jsonl")]
        prepare(PrepareRequest(sources, root / f"set-{name}", open_tokenizer("bytes"), workers=1))
    data = MIXTURES[request.param].format(a=root / "set-a", b=root / "set-b")
    text = RUN.format(folder=root / "run", data=data)
    (root / "run.toml").write_text(text)
    Run.open(root / "run.toml").train()
    return root / "run"


@pytest.fixture
def samples(folder: Path) -> RunSamples:
    return open_samples(folder)


def test_the_parts_of_documents_are_the_sample(samples: RunSamples) -> None:
    for sample in range(40):
        ids = samples.stream.read(np.array([sample])).ids_BS[0].tolist()
        parts = samples.documents(sample)
        joined = [
            id for part in parts for id in part.tokens.reader.read(part.begin, part.count).tolist()
        ]
        assert joined == ids
        for part in parts:
            starts = part.tokens.reader.document_starts
            assert starts[part.document] + part.offset == part.begin


def test_steps_and_samples_belong_together(samples: RunSamples) -> None:
    assert samples.last_step == 30
    assert [samples.of_step(step) for step in (1, 2, 30)] == [
        range(4), range(4, 8), range(116, 120)
    ]  # fmt: skip
    for step in (1, 2, 17, 30):
        assert {samples.step_of(sample) for sample in samples.of_step(step)} == {step}
    assert samples.step_of(120) is None
    with pytest.raises(UserError, match="steps 1 to 30"):
        samples.of_step(31)


def test_a_batch_that_was_passed_over_has_no_step(samples: RunSamples) -> None:
    steps = [step for step in samples.steps if step != 7]
    ends = [end for step, end in zip(samples.steps, samples.ends, strict=True) if step != 7]
    less = RunSamples(
        samples.folder, samples.config, samples.resolved, samples.stream, samples.tokenizer,
        steps, ends,
    )  # fmt: skip
    assert less.of_step(7) == samples.of_step(7)
    assert less.was_left_out(7) and not less.was_left_out(8)
    assert [less.step_of(sample) for sample in (23, 24, 27, 28)] == [6, None, None, 8]


def test_the_steps_of_a_place_are_those_that_saw_all_of_it(samples: RunSamples) -> None:
    places = [
        TokenPlace(number, begin, begin + 6)
        for number in (0, 1)
        for begin in range(0, len(samples.stream.sets[number].reader) - 6, 11)
    ]
    expected = set()
    for sample in range(120):
        parts = samples.documents(sample)
        number = samples.stream.sets.index(parts[0].tokens)
        begin, end = parts[0].begin, parts[-1].begin + parts[-1].count
        for place, where in enumerate(places):
            if where.number == number and begin <= where.begin and where.end <= end:
                expected.add((place, sample // 4 + 1))
    assert expected
    assert set(samples.with_places(places)) == expected


def run_command(*words: object) -> Any:
    result = CliRunner().invoke(app, ["tokens", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_commands_name_the_lines_of_the_sources(folder: Path, samples: RunSamples) -> None:
    shown = run_command("which", folder, "--step", 3, "--sample", 1)
    (row,) = shown["samples"]
    assert row["of_run"] == 9
    for document in row["documents"]:
        line = Path(document["source"]).read_text().splitlines()[document["line"] - 1]
        assert document["text"].removesuffix("<|endoftext|>") in json.loads(line)["text"]
    every = run_command("which", folder, "--step", 3)
    assert [row["of_run"] for row in every["samples"]] == [8, 9, 10, 11]

    found = run_command("find", "b17: the", folder)
    (place,) = found["places"]
    assert (found["found"], place["line"]) == (1, 18)
    assert place["steps"]
    for step in range(1, 31):
        texts = (
            [
                "".join(document["text"] for document in row["documents"])
                for row in (
                    run_command("which", folder, "--step", step, "--sample", number)["samples"][0]
                    for number in range(4)
                )
            ]
            if step in (place["steps"][0], 1)
            else []
        )
        if texts:
            assert any("b17: the" in text for text in texts) == (step in place["steps"])


def test_what_cannot_be_looked_up_is_told(folder: Path, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        result = CliRunner().invoke(app, ["tokens", *map(str, words)])
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    assert "no run.toml" in refused("which", tmp_path, "--step", 1)
    assert "samples 0 to 3" in refused("which", folder, "--step", 1, "--sample", 4)
    assert "steps 1 to 30" in refused("which", folder, "--step", 99)
    assert "no token set" in refused("find", "x", tmp_path / "nothing")


def test_a_run_whose_batch_depends_on_its_processes(
    make_run: Callable[..., Any], tmp_path: Path
) -> None:
    config = make_run("train.batch=unset", "train.micro_batch=3", 'train.until="4 steps"')
    outcome = Run(config).train()
    assert open_samples(outcome.folder).of_step(3) == range(6, 9)
