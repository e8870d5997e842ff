"""Parts of a preparation: disjoint, complete, and merged into the files of the whole."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gristmill.base.errors import UserError
from gristmill.cli.main import app
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import WHOLE, PartNumber, PrepareRequest, parse_part, spans_of
from gristmill.text.sources.reading import find_sources
from gristmill.text.sources.source import DocumentSplit, ReadOptions, lines_before
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens.store import verify_tokens

BYTES = ByteTokenizer()


def test_numbers() -> None:
    assert parse_part("2/8") == PartNumber(2, 8)
    assert PartNumber(2, 8).suffix == ".part-2-of-8"
    assert PartNumber(2, 100).suffix == ".part-002-of-100"
    assert parse_part("2", parts=8) == parse_part("2/8", parts=8) == PartNumber(2, 8)
    assert parse_part(None) == WHOLE
    for wrong in ("0/3", "4/3", "1/0"):
        with pytest.raises(UserError, match=r"does not exist|not a part"):
            parse_part(wrong)
    for wrong in ("a/b", "-1/2", "", "1/"):
        with pytest.raises(UserError, match="not a part of a whole"):
            parse_part(wrong)
    with pytest.raises(
        UserError, match=r"--part 2: the number of parts is not known\n +add --parts"
    ):
        parse_part("2")
    with pytest.raises(UserError, match="--part 2/8: this contradicts --parts 9"):
        parse_part("2/8", parts=9)


def slurm_array(task: int, first: int, last: int, count: int | None = None) -> dict[str, str]:
    numbers = {"ID": task, "MIN": first, "MAX": last, "COUNT": count or last - first + 1}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


def test_a_task_of_a_job_array_does_the_part_of_its_number() -> None:
    whole = slurm_array(3, 1, 8)
    for part, parts in (("slurm", None), ("slurm", 8), (None, 8)):
        assert parse_part(part, parts=parts, environment=whole) == PartNumber(3, 8)
    # The same task once more, alone, with two others, or in another array.
    for again in (slurm_array(3, 3, 3), slurm_array(3, 3, 7, 3), slurm_array(3, 1, 3, 2)):
        assert parse_part("slurm", parts=8, environment=again) == PartNumber(3, 8)
        assert parse_part(None, parts=8, environment=again) == PartNumber(3, 8)
        with pytest.raises(
            UserError, match=r"task 3: the number of parts is not known\n.*add --parts"
        ):
            parse_part("slurm", environment=again)
    with pytest.raises(UserError, match="number of parts is not known"):
        parse_part("slurm", environment=slurm_array(1, 1, 1))
    for parts in (None, 8):
        with pytest.raises(UserError, match=r"counted from 0.*\n.*--array=1-8"):
            parse_part("slurm", parts=parts, environment=slurm_array(3, 0, 7))
    with pytest.raises(UserError, match="part 9 of 8 does not exist"):
        parse_part("slurm", parts=8, environment=slurm_array(9, 9, 9))


def test_other_schedulers_and_none() -> None:
    assert parse_part(None, parts=8, environment={"PBS_ARRAY_INDEX": "3"}) == PartNumber(3, 8)
    assert parse_part("pbs", parts=8, environment={"PBS_ARRAY_INDEX": "3"}) == PartNumber(3, 8)
    with pytest.raises(UserError, match="add --parts"):
        parse_part("pbs", environment={"PBS_ARRAY_INDEX": "3"})
    step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8"}
    assert parse_part("slurm", environment=step) == PartNumber(3, 8)
    assert parse_part(None, parts=9, environment=step) == PartNumber(3, 9)
    # A batch script, and one task of srun: neither says which part it is.
    alone = ({"SLURM_PROCID": "0"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, {})
    for environment in alone:
        for part, parts in (("slurm", None), ("slurm", 8), (None, 8)):
            with pytest.raises(UserError, match=r"not a task of a job array.*\n.*--part 2/8"):
                parse_part(part, parts=parts, environment=environment)
    with pytest.raises(UserError, match="PBS_ARRAY_INDEX is not set"):
        parse_part("pbs", parts=8, environment=step)


def test_one_task_again_makes_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm_array(3, 3, 3).items():
        monkeypatch.setenv(name, value)
    words = ["prepare", *write(tmp_path / "in", 7), "-o", str(tmp_path / "set"), "-t", "bytes"]
    refused = CliRunner().invoke(app, [*words, "--part", "slurm"])
    assert isinstance(refused.exception, UserError)
    assert list(tmp_path.glob("set*")) == []
    made = CliRunner().invoke(app, [*words, "--part", "slurm", "--parts", "4"])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "set.part-3-of-4.json").is_file()
    assert not (tmp_path / "set.json").exists()


def write(folder: Path, seed: int) -> list[str]:
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.txt", "e.jsonl", "f.txt"):
        lines = [
            json.dumps({"text": "x" * chance.randrange(80)}) if chance.random() < 0.9 else "bad"
            for _ in range(chance.randrange(40))
        ]
        content = "\n".join(lines).encode() + chance.choice((b"", b"\n"))
        (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    return [str(folder)]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), of=st.integers(1, 9), split=st.sampled_from(DocumentSplit))
def test_parts_are_disjoint_and_complete(
    tmp_path_factory: pytest.TempPathFactory, seed: int, of: int, split: DocumentSplit
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    paths = write(folder / "in", seed)
    options = ReadOptions(split=split, block_bytes=100)

    def run(part: PartNumber, output: Path) -> Any:
        request = PrepareRequest(paths, output, BYTES, part=part, options=options, workers=1)
        return prepare(request).keys[0].ledger

    whole = run(PartNumber(1, 1), folder / "whole")
    parts = [run(PartNumber(number, of), folder / "part") for number in range(1, of + 1)]
    assert sum(part.lines for part in parts) == whole.lines
    assert sum(part.kept for part in parts) == whole.kept
    places = [place for part in parts for place in part.places]
    assert places[:100] == whole.places


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".part-" not in str(path)
    }


FORMATS: dict[str, list[str]] = {
    "flat": [],
    "megatron": ["--format", "megatron"],
    "llmc": ["--format", "llmc", "--shard-size", "300"],
    "npy": ["--format", "npy", "--shard-size", "300"],
}


@pytest.mark.parametrize("format", FORMATS)
def test_merged_parts_are_the_files_of_one_preparation(tmp_path: Path, format: str) -> None:
    sources = write(tmp_path / "in", 7)
    merge = ["--shard-size", "300"] if format in ("llmc", "npy") else []

    def run(*words: str) -> None:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output

    # Nine parts of six small files: some of them get nothing.
    for number in range(1, 10):
        run("prepare", *sources, "-o", str(tmp_path / "out" / "set"), "-t", "bytes",
            "--part", f"{number}/9", *FORMATS[format])  # fmt: skip
    run("prepare", *sources, "-o", str(tmp_path / "one" / "set"), "-t", "bytes", *FORMATS[format])
    name = "set_text_document" if format == "megatron" else "set"
    parts = tmp_path / "out" / f"{name}.part-*-of-9"
    assert any(json.loads(path.read_text())["documents"] == 0
               for path in tmp_path.glob("out/*part-?-of-9.json"))  # fmt: skip
    for path in tmp_path.glob("out/*part-?-of-9.json"):
        assert verify_tokens(path.with_suffix("")) == []
    run("tokens", "merge", str(parts), "-o", str(tmp_path / "out" / name), *merge)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


def test_a_linked_folder_is_counted_once_in_all_parts(tmp_path: Path) -> None:
    sources = write(tmp_path / "in", 7)
    (tmp_path / "in" / "linked").symlink_to(tmp_path)
    for number in (1, 2):
        prepare(PrepareRequest(sources, tmp_path / "set", BYTES, part=PartNumber(number, 2)))
    whole = prepare(PrepareRequest(sources, tmp_path / "whole", BYTES)).keys[0]
    words = ["tokens", "merge", str(tmp_path / "set.part-*"), "-o", str(tmp_path / "set")]
    assert CliRunner().invoke(app, words).exit_code == 0
    merged = json.loads((tmp_path / "set.ledger.json").read_text())
    assert merged == json.loads((tmp_path / "whole.ledger.json").read_text())
    assert merged.keys() > whole.ledger.as_json().keys()
    assert merged["skipped"] == {"linked folder": 1}


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    sources = write(tmp_path / "in", 7)
    for number in (1, 3):
        prepare(PrepareRequest(sources, tmp_path / "set", BYTES, part=PartNumber(number, 3)))
    for sets in ([tmp_path / "set.part-*"], [tmp_path / "set.part-1-of-3"]):
        words = [str(word) for word in ("tokens", "merge", *sets, "-o", tmp_path / "all")]
        error = CliRunner().invoke(app, words).exception
        assert isinstance(error, UserError)
        assert "part-2-of-3" in error.problems[0].what
    assert not (tmp_path / "all.json").exists()
    error = (
        CliRunner()
        .invoke(app, ["tokens", "merge", str(tmp_path / "no*"), "-o", str(tmp_path / "x")])
        .exception
    )
    assert "no token set matches" in str(error)


def test_spans_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("0123\n5678\n0\n")
    options = ReadOptions()
    sources = find_sources([str(path)], options).sources
    spans = [spans_of(sources, options, PartNumber(n, 3)) for n in (1, 2, 3)]
    assert [(span.begin, span.end) for (span,) in spans] == [(0, 4), (4, 8), (8, 12)]
    # Line 2 begins at byte 5 and line 3 at byte 10.
    assert [1 + lines_before(sources[0], span.begin) for (span,) in spans] == [1, 2, 3]


def test_a_pipe_has_no_parts() -> None:
    with pytest.raises(UserError, match="cannot be divided"):
        prepare(PrepareRequest(["/dev/null"], Path("x"), BYTES, part=PartNumber(1, 2)))
