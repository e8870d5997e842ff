"""`tokens` and `prepare --format` as a person uses them, and training on what they make."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli import progress
from gristmill.cli.main import app
from gristmill.cli.options import TokenFormat
from gristmill.cli.tokens import IdType
from gristmill.config.schema import DataConfig
from gristmill.data.dataset import open_data
from gristmill.tokens import format as token_format
from gristmill.tokens.format import DTYPES
from gristmill.tokens.store import FORMATS, open_tokens, verify_tokens

TEXT = "The mill turns, the corn is ground, the flour is white.\n" * 40
RUN = """
name = "corn"
folder = "{folder}"
[model]
layers = 1
heads = 2
width = 8
context = 16
[data]
paths = "{paths}"
split = "8,2"
[train]
until = "2 steps"
batch = 2
[optim]
lr = 1e-2
[runtime]
device = "cpu"
threads = 1
"""


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def corn(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("prepare", tmp_path / "text.txt", "-o", tmp_path / "corn", "-t", "bytes")
    run(*words, "--documents", "line")
    return tmp_path / "corn"


def foreign(corn: Path, name: str) -> Path:
    """The same ids as Megatron, llm.c and nanoGPT would leave them."""
    reader = open_tokens(corn)
    ids = reader.read(0, len(reader)).astype("<u2").tobytes()
    prefix = corn.with_name(name)
    if name == "megatron":
        count = len(reader)
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
        Path(f"{prefix}.idx").write_bytes(index + struct.pack("<iqqq", count, 0, 0, 1))
        Path(f"{prefix}.bin").write_bytes(ids)
    elif name == "llmc":
        header = struct.pack("<3i", 20240520, 1, len(reader)) + bytes(253 * 4)
        Path(f"{prefix}_000001.bin").write_bytes(header + ids)
    else:
        Path(f"{prefix}.bin").write_bytes(ids)
    return prefix


def run_file(folder: Path, paths: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(RUN.format(folder=folder / "run", paths=paths))
    return file


def test_the_choices_are_all_formats_and_known_types() -> None:
    assert {choice.value for choice in TokenFormat} == set(FORMATS)
    assert {choice.value for choice in IdType} <= set(DTYPES)


TYPES = dict.fromkeys(("megatron-cached", "megatron-lazy"), "int32")
"""Of formats that store ids in a type of their own."""


@pytest.mark.parametrize("format", FORMATS)
def test_prepare_in_every_format(corn: Path, format: str) -> None:
    sharded = FORMATS[format].sharded
    output = run(
        "prepare", corn.with_name("text.txt"), "-o", corn.with_name(format), "-t", "bytes",
        "--documents", "line", "--format", format, *(["--shard-size", 500] if sharded else []),
    )  # fmt: skip
    assert "2,240 tokens in 40 documents" in output
    of_megatron = format.startswith("megatron")
    made = corn.with_name(f"{format}_text_document" if of_megatron else format)
    assert "intact" in run("tokens", "verify", made)
    shown = run("tokens", "inspect", made)
    assert f"format      {format}, {TYPES.get(format, 'uint16')}" in shown
    assert "document 0  'The mill turns" in shown
    one, two = open_tokens(corn), open_tokens(made)
    assert (one.read(0, len(one)) == two.read(0, len(two))).all()
    assert (one.info.fingerprint == two.info.fingerprint) == (format not in TYPES)
    if sharded:
        assert len(list(corn.parent.glob(f"{format}_*"))) == 5


def test_a_shard_size_without_shards_is_refused(corn: Path) -> None:
    with pytest.raises(UserError, match="--shard-size: a set of the format flat is one file"):
        run("prepare", corn.with_name("text.txt"), "-o", corn.with_name("x"), "-t", "bytes",
            "--shard-size", 5)  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_convert_there_and_back(corn: Path, format: str) -> None:
    there, back = corn.with_name("there"), corn.with_name("back")
    output = run("tokens", "convert", corn, "-o", there, "--format", format)
    shown = f"{format}, {TYPES.get(format, 'uint16')}"
    assert f"{there}: 2,240 tokens in 40 documents, {shown}" in output
    run("tokens", "convert", there, "-o", back, "--format", "flat")
    for suffix in (".bin", ".starts"):
        assert Path(f"{back}{suffix}").read_bytes() == Path(f"{corn}{suffix}").read_bytes()
    assert "document 0  'The mill turns" in run("tokens", "inspect", back)
    with pytest.raises(UserError, match="already a token set"):
        run("tokens", "convert", corn, "-o", there, "--format", format)
    run("tokens", "convert", corn, "-o", there, "--format", format, "--overwrite")


def test_a_run_goes_on_with_converted_files(corn: Path, tmp_path: Path) -> None:
    run("train", run_file(tmp_path, corn))
    other = corn.with_name("other")
    run("tokens", "convert", corn, "-o", other, "--format", "megatron")
    words = ("train", tmp_path / "run", f"data.paths={other}", "train.until=3 steps")
    assert "done at step 3" in run(*words)


def test_merge(corn: Path) -> None:
    run("tokens", "convert", corn, "-o", corn.with_name("b"), "--format", "megatron")
    both = corn.with_name("both")
    output = run("tokens", "merge", corn, corn.with_name("b"), "-o", both, "--format", "npy")
    assert "4,480 tokens in 80 documents, npy" in output
    assert "intact" in run("tokens", "verify", both)
    assert Path(f"{both}.tokenizer").is_dir()


def test_plain_ids_become_a_set_that_trains(corn: Path, tmp_path: Path) -> None:
    plain = foreign(corn, "plain")
    with pytest.raises(UserError, match="unfinished"):
        run("tokens", "inspect", plain)
    shown = run("tokens", "inspect", plain, "--from", "flat", "--end-of-text", 256)
    assert "documents   40" in shown
    assert "vocabulary  unknown, end of text 256" in shown
    assert "tokenizer   unknown" in shown
    verified = run("tokens", "verify", plain, "--from", "flat")
    assert "readable; without a manifest" in verified
    run("tokens", "convert", f"{plain}.bin", "--from", "flat", "--end-of-text", 256, "-t", "bytes",
        "-o", corn.with_name("ours"), "--format", "flat")  # fmt: skip
    for suffix in (".bin", ".starts"):
        ours = Path(f"{corn.with_name('ours')}{suffix}")
        assert ours.read_bytes() == Path(f"{corn}{suffix}").read_bytes()
    assert "done at step 2" in run("train", run_file(tmp_path, corn.with_name("ours")))


def test_without_a_tokenizer_the_new_set_says_so(corn: Path) -> None:
    output = run(
        "tokens", "convert", foreign(corn, "llmc"), "-o", corn.with_name("new"), "--format", "npy"
    )
    assert "the tokenizer is unknown" in output
    assert "vocabulary  257" in run("tokens", "inspect", corn.with_name("new"))


@pytest.mark.parametrize("name", ["megatron", "llmc"])
def test_training_on_files_of_other_programs(corn: Path, tmp_path: Path, name: str) -> None:
    file = run_file(tmp_path, foreign(corn, name))
    assert "assumed: the token files do not say" in run("config", file)
    with pytest.raises(UserError) as caught:
        run("train", file)
    assert "do not say which tokenizer made them\n    name it with data.tokenizer" in str(
        caught.value
    )
    assert caught.value.exit is Exit.DATA
    assert "done at step 2" in run("train", file, "data.tokenizer=bytes")
    # The run goes on with the same files, and not with others.
    assert "done at step 3" in run("train", tmp_path / "run", "train.until=3 steps")


def test_training_refuses_a_tokenizer_that_is_too_small(corn: Path, tmp_path: Path) -> None:
    for name, ids in (("large", [0, 300, 5] * 400), ("negative", [1, -3] * 400)):
        np.save(tmp_path / f"{name}_1.npy", np.array(ids, dtype="<i4"))
    file = run_file(tmp_path, tmp_path / "large")
    with pytest.raises(UserError, match="hold the id 300, and the tokenizer has 257 ids"):
        run("train", file, "data.tokenizer=bytes")
    with pytest.raises(UserError, match="hold the id -3"):
        run("train", run_file(tmp_path, tmp_path / "negative"), "data.tokenizer=bytes")


def test_validation_files_of_other_programs_are_checked_too(corn: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "large_1.npy", np.array([0, 300, 5] * 400, dtype="<u2"))
    held = foreign(corn, "megatron")
    text = RUN.format(folder=tmp_path / "run", paths=corn).replace('split = "8,2"', "")
    for name, wanted in ((held, None), (tmp_path / "large", "hold the id 300")):
        file = tmp_path / "run.toml"
        file.write_text(text.replace("[train]", f'validation = "{name}"\n[train]'))
        if wanted is None:
            assert "done at step 2" in run("train", file)
        else:
            with pytest.raises(UserError, match=wanted):
                run("train", file, f"folder={tmp_path / 'other'}")


@pytest.mark.parametrize("ours_first", [True, False])
def test_an_unknown_tokenizer_is_no_contradiction(corn: Path, ours_first: bool) -> None:
    pair = [str(corn), str(foreign(corn, "megatron"))]
    train, held = pair if ours_first else reversed(pair)
    parts = open_data(DataConfig(paths=train, validation=held), sequence=8)
    assert parts.validation is not None


def test_a_folder_is_no_name_for_token_files(
    corn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())
    for command in (("prepare", "text.txt", "-t", "bytes"), ("tokens", "merge", corn)):
        for output in ("new/", "there", "there/"):
            with pytest.raises(UserError, match=rf"is a folder.*\n.*: -o {output.strip('/')}/NAME"):
                run(*command, "-o", output)
        with pytest.raises(UserError, match="name is empty"):
            run(*command, "-o", "")
    assert sorted(tmp_path.iterdir()) == before


def test_the_column_of_a_dataset_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "all.jsonl").write_text('{"id": "x1", "body": "long text"}\n')
    source = f"hf:{tmp_path / 'data'}"
    with pytest.raises(UserError, match=r"no column 'text'; the columns are: id .*, body"):
        run("prepare", source, "-o", tmp_path / "set", "-t", "bytes")
    output = run("prepare", source, "-o", tmp_path / "set", "-t", "bytes", "--json-key", "body")
    assert f"{source}: reading the column 'body'" in output


# ------------------------------------------------------------------ for programs


def answer(*words: object, code: int = 0) -> Any:
    """What a command prints to standard output, as JSON."""
    result = CliRunner().invoke(app, [*(str(word) for word in words), "--json"])
    assert result.exit_code == code or isinstance(result.exception, UserError)
    return json.loads(result.stdout)


def test_prepare_as_json(corn: Path) -> None:
    words = ("prepare", corn.with_name("text.txt"), "-o", corn.with_name("new"), "-t", "bytes")
    made = answer(*words, "--documents", "line", "--split", "8,2")
    assert [one["name"] for one in made["sets"]] == [
        str(corn.with_name("new_train")),
        str(corn.with_name("new_val")),
    ]
    assert sum(one["tokens"] for one in made["sets"]) == 2240
    assert made["ledgers"][0]["lines"] == made["ledgers"][0]["kept"] == 40
    assert made["text_bytes"] == made["new_text_bytes"] == len(TEXT.replace("\n", ""))


def test_inspect_and_verify_as_json(corn: Path) -> None:
    shown = answer("tokens", "inspect", corn)
    assert shown["info"]["tokens"] == 2240
    assert shown["length_quantiles"]["0.5"] == 56
    assert shown["first_documents"][0].startswith("'The mill turns")
    assert answer("tokens", "verify", corn) == {
        "name": str(corn), "intact": True, "checksums_compared": True, "problems": []
    }  # fmt: skip
    foreign(corn, "llmc")
    assert not answer("tokens", "verify", corn.with_name("llmc"))["checksums_compared"]
    content = bytearray(Path(f"{corn}.bin").read_bytes())
    content[7] ^= 1
    Path(f"{corn}.bin").write_bytes(content)
    broken = answer("tokens", "verify", corn, code=Exit.DATA)
    assert not broken["intact"]
    assert broken["problems"][0]["where"] == f"{corn}.bin"
    with pytest.raises(UserError, match="checksum differs"):
        run("tokens", "verify", corn, "--quiet")


def test_quiet_commands_print_nothing(corn: Path) -> None:
    source = corn.with_name("text.txt")
    for words in (
        ("prepare", source, "-o", corn.with_name("new"), "-t", "bytes"),
        ("tokens", "inspect", corn),
        ("tokens", "verify", corn),
    ):
        assert run(*words, "--quiet") == ""
    assert answer("tokens", "verify", corn, "-q")["intact"]


def test_progress_and_result_have_one_unit(corn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    words = ("prepare", corn.with_name("text.txt"), "-o", corn.with_name("new"), "-t", "bytes")
    said = run(*words, "--workers", "1").splitlines()
    shown = [line for line in said if line.startswith("preparing: ")]
    assert shown and all(line.count("/s") == 1 and "B of text/s" in line for line in shown)
    assert said[-1].count("B of text/s") == 1


@pytest.mark.parametrize("format", FORMATS)
def test_verify_tells_how_far_it_is(
    corn: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(token_format, "PIECE", 100)
    made = corn.with_name("made")
    run("tokens", "convert", corn, "-o", made, "--format", format)
    seen: list[tuple[int, int]] = []
    assert verify_tokens(made, progress=lambda *state: seen.append(state)) == []
    done = [state[0] for state in seen]
    assert done == sorted(done) and len(done) > 20
    assert seen[-1][0] == seen[-1][1]
    shown = [line for line in run("tokens", "verify", made).splitlines() if "verifying: " in line]
    assert "100%" in shown[-1] and "/s" in shown[-1]
    assert "verifying" not in run("tokens", "verify", made, "--quiet")


def test_messages_name_the_option(corn: Path) -> None:
    with pytest.raises(UserError, match="--overwrite"):
        run("prepare", corn.with_name("text.txt"), "-o", corn, "-t", "bytes")
    with pytest.raises(UserError, match="--from, --dtype and --end-of-text"):
        run("tokens", "inspect", corn, "--end-of-text", 3)
    Path(f"{corn}x.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"\(--dtype\)"):
        run("tokens", "inspect", f"{corn}x", "--from", "flat")
    with pytest.raises(UserError, match="leave out --dtype"):
        run("tokens", "inspect", foreign(corn, "llmc"), "--dtype", "uint32")


HELP = [("prepare",), *(("tokens", name) for name in ("inspect", "verify", "convert", "merge"))]


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_has_room_for_its_words(words: tuple[str, ...]) -> None:
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    shown = CliRunner().invoke(app, [*words, "--help"], env=environment).output
    assert "…" not in shown.replace("SOURCE…", "")
    assert ("xample" in shown and " Output " in shown) or words[1:] in (("inspect",), ("verify",))
    for line in shown.splitlines():
        assert len(line) <= 80
        if line.startswith(("│ --", "│ *  --", "│    --")):
            # The help of an option begins before the middle and a little.
            words_of_help = line.strip("│ ").rpartition("  ")[2]
            assert line.index(words_of_help) <= 48
