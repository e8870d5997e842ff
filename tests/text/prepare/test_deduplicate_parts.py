"""Deduplication in parts and against older sets, from the command line."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli import prepare_parts
from gristmill.cli.main import app
from gristmill.text.prepare.part_status import PartState, part_statuses
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens.store import open_tokens

BYTES = ByteTokenizer()
KINDS = {
    "exact": ["--dedup", "exact"],
    "minhash": ["--dedup", "minhash", "--split", "8,2", "--seed", "3"],
    "line": ["--dedup", "exact", "--dedup-by", "line", "--dedup-min-length", "9"],
    "filtered": ["--filter", "own=shorten.py:shorten", "--dedup", "exact"],
}
SHORTEN = """
def shorten(document):
    if "broken" in document["text"]:
        raise ValueError("a bad day")
    return {"text": document["text"].removesuffix("\\nand more")}
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    chance = random.Random(7)
    words = ["".join(chance.choices("abcdefg", k=5)) for _ in range(200)]
    texts = [" ".join(chance.choices(words, k=40)) for _ in range(80)]
    texts += [f"{text}\nand more" for text in chance.choices(texts, k=40)]
    texts += chance.choices(texts, k=60)
    chance.shuffle(texts)
    lines = [json.dumps({"text": text}) for text in texts]
    Path("in/a.jsonl").write_text("\n".join(lines[:100]) + "\n")
    Path("in/b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[100:130]).encode()))
    Path("in/c.jsonl").write_text("\n".join([*lines[130:], "nonsense"]))
    Path("shorten.py").write_text(SHORTEN)


def invoke(*words: str, command: str = "prepare") -> str:
    result = CliRunner().invoke(app, [*command.split(), *words])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def files_of(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and ".part-" not in str(path) and ".dedup" not in str(path)
    }


class HereTasks:
    """An engine that does each part in this process; some die when they begin first."""

    name, poll_seconds, running, chooses_machine = "here", 0.0, (), True

    def __init__(self, arguments: list[str], dying: set[int]) -> None:
        self.started: list[int] = []
        self._arguments, self._dying = arguments, dying
        self._ended: dict[int, int] = {}

    def attach(self, jobs: Any) -> tuple[int, ...]:
        return ()

    def start(self, numbers: list[int]) -> None:
        for number in numbers:
            self.started.append(number)
            if number in self._dying:
                self._dying.remove(number)
                self._ended[number] = -9
                continue
            result = CliRunner().invoke(app, [*self._arguments, str(number)])
            error = result.exception
            status = error.exit if isinstance(error, UserError) else result.exit_code
            self._ended[number] = status

    def jobs(self) -> dict[str, Any]:
        return {}

    def poll(self) -> dict[int, int]:
        ended, self._ended = self._ended, {}
        return ended

    def end(self, number: int) -> None:
        raise AssertionError

    def stop(self) -> str:
        return ""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[HereTasks]]:
    """Let `--engine local` do the parts in this process."""

    def use(*dying: int) -> list[HereTasks]:
        made: list[HereTasks] = []

        def build(arguments: list[str], options: Any, **places: Any) -> HereTasks:
            made.append(HereTasks(arguments, set(dying)))
            return made[-1]

        monkeypatch.setattr(prepare_parts, "_build_engine", build)
        return made

    return use


def test_what_is_compared_has_been_filtered() -> None:
    plain = invoke("in", "-o", "plain/set", "-t", "bytes", "--dedup", "exact")
    filtered = invoke("in", "-o", "filtered/set", "-t", "bytes", *KINDS["filtered"])

    def kept(said: str) -> int:
        return int(said.split(" read = ")[1].split(" kept")[0])

    # Documents that only differ by what the filter removes are the same behind it.
    assert kept(filtered) == 80 < kept(plain)


def test_a_filter_that_fails_in_the_first_pass(here: Callable[..., list[HereTasks]]) -> None:
    with Path("in/a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "this one is broken"}) + "\n")
    words = ["in", "-o", "set", "-t", "bytes", *KINDS["filtered"]]
    with pytest.raises(UserError, match=r"in/a.jsonl:101: .* raised ValueError: a bad day"):
        invoke(*words)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_one_process(kind: str, here: Callable[..., list[HereTasks]]) -> None:
    said = invoke("in", "-o", "one/set", "-t", "bytes", *KINDS[kind])
    made = here(2)
    words = ["in", "-o", "many/set", "-t", "bytes", *KINDS[kind], "--engine", "local"]
    told = invoke(*words, "--parts", "5")
    assert files_of("many") == files_of("one")
    assert [path.name for path in Path("many").iterdir() if path.name.startswith(".")] == []
    # Each part is signed first, and the one that died again.
    assert made[0].started == [1, 2, 3, 4, 5, 2, 1, 2, 3, 4, 5]
    assert "signing 5 parts" in told and "\n5 parts" in told
    assert next(line for line in said.splitlines() if " read = " in line) in told


def test_a_driver_that_is_killed_goes_on(
    here: Callable[..., list[HereTasks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["in", "-o", "many/set", "-t", "bytes", "--dedup=minhash", "--engine", "local"]
    invoke(*words[:-2], "-o", "one/set")
    places = ("group_and_drop", "_merge_parts", "remove_files")
    counts = []
    for place in places:
        made = here()
        with monkeypatch.context() as patch:
            patch.setattr(f"gristmill.text.prepare.all_parts.{place}", fail)
            result = CliRunner().invoke(app, ["prepare", *words, "--parts", "3"])
            assert isinstance(result.exception, SystemError)
        counts.append(made[0].started)
    assert counts == [[1, 2, 3], [1, 2, 3], []]
    made = here()
    invoke(*words, "--parts", "3")
    assert made[0].started == [] and files_of("many") == files_of("one")


def fail(*arguments: object, **named: object) -> None:
    raise SystemError("killed here")


def states() -> list[PartState]:
    return [status.state for status in part_statuses(Path("many/set"))]


def test_a_job_array() -> None:
    words = ["in", "-o", "many/set", "-t", "bytes", "--dedup", "minhash"]
    invoke(*words, "-o", "one/set")
    for number in (1, 3):
        assert "when all parts are, group them" in invoke(*words, "--part", f"{number}/3")
    assert states() == [PartState.SIGNED, PartState.MISSING, PartState.SIGNED]
    with pytest.raises(UserError, match=r"1 of 3 parts are not signed as .* now: 2/3") as error:
        invoke(*words, "--parts", "3", "--dedup-group")
    assert error.value.exit == Exit.REFUSED
    invoke(*words, "--part", "2/3")
    # A source that changed: its part is signed again, and prepared with new groups.
    Path("in/c.jsonl").write_text(Path("in/c.jsonl").read_text().replace("and more", "and less"))
    invoke(*words, "-o", "one/set", "--overwrite")
    with pytest.raises(UserError, match=r"are not signed as .* now: 3/3"):
        invoke(*words, "--parts", "3", "--dedup-group")
    invoke(*words, "--part", "3/3")
    invoke(*words, "--parts", "3", "--dedup-group")
    for number in (2, 1, 3, 1):
        invoke(*words, "--part", f"{number}/3")
    assert states() == [PartState.DONE] * 3
    invoke("many/set.part-*", "-o", "many/set", command="tokens merge")
    assert files_of("many").items() >= files_of("one").items()
    # The command by itself makes the same beside the parts.
    invoke(*words, "--overwrite", "--part", "1/3")


def texts_of(prefix: str) -> list[str]:
    reader = open_tokens(prefix)
    begins = reader.document_starts.tolist()
    ends = [*begins[1:], len(reader)]
    return [
        BYTES.decode(reader.read(begin, end - begin - 1).tolist())
        for begin, end in zip(begins, ends, strict=True)
    ]


def counts(prefix: str) -> dict[str, int]:
    dropped: dict[str, int] = json.loads(Path(f"{prefix}.ledger.json").read_text())["dropped"]
    return dropped


@pytest.mark.parametrize("method", ["exact", "minhash"])
def test_what_older_sets_contain_goes(method: str) -> None:
    dedup = ["-t", "bytes", "--dedup", method]
    invoke("in/a.jsonl", "-o", "out/a", *dedup)
    invoke("in/b.jsonl.gz", "-o", "out/b", *dedup)
    both = ["--against", "out/a", "--against", "out/b"]
    invoke("in/c.jsonl", "-o", "out/c", *dedup, *both)
    old = {*texts_of("out/a"), *texts_of("out/b")}
    assert not old & set(texts_of("out/c"))
    assert counts("out/c")["duplicate of an older set"] > 20
    if method == "exact":
        texts = [
            json.loads(line)["text"] for line in Path("in/c.jsonl").read_text().split("\n")[:-1]
        ]
        assert texts_of("out/c") == [text for text in dict.fromkeys(texts) if text not in old]
    # The same, from the text of the older sets, from signatures of another kind, and in parts.
    for name in ("a", "b"):
        Path(f"out/{name}.signatures").rename(f"out/{name}.away")
    said = invoke("in/c.jsonl", "-o", "text/c", *dedup, *both)
    assert "out/a: reading its text" in said
    assert files_of("text") == {
        name: content for name, content in files_of("out").items() if name.startswith("c")
    }
    for name in ("a", "b"):
        Path(f"out/{name}.away").rename(f"out/{name}.signatures")
    words = ["in/c.jsonl", "-o", "parts/c", *dedup, *both, "--parts", "3"]
    for number in range(1, 4):
        invoke(*words, "--part", str(number))
    invoke(*words, "--dedup-group")
    for number in range(1, 4):
        invoke(*words, "--part", str(number))
    invoke("parts/c.part-*", "-o", "parts/c", command="tokens merge")
    assert files_of("parts").items() >= files_of("text").items()


def test_signatures_of_another_kind() -> None:
    invoke("in/a.jsonl", "-o", "out/a", "-t", "bytes", "--dedup", "minhash")
    common = ["in/a.jsonl", "-t", "bytes", "--against", "out/a"]
    # Every kind of signature tells what is equal.
    exact = invoke(*common, "-o", "out/b", "--dedup", "exact")
    assert "reading its text" not in exact
    for name, more in (("c", ["--dedup-words", "3"]), ("d", ["--dedup-buckets", "20"])):
        with pytest.raises(UserError, match="no document was found"):
            invoke(*common, "-o", f"out/{name}", "--dedup", "minhash", *more)
    with pytest.raises(UserError, match="no document was found in 100 lines"):
        invoke(*common, "-o", "out/e", "--dedup", "exact", "--dedup-by", "line")
    # A set that replaced another is not taken for it.
    invoke("in/c.jsonl", "-o", "out/a", "-t", "bytes", "--overwrite")
    Path("out/a.signatures").write_bytes(Path("out/b.signatures").read_bytes())
    assert "reading its text" in invoke(*common, "-o", "out/f", "--dedup", "exact")
    assert not set(texts_of("out/a")) & set(texts_of("out/f"))


def test_older_sets_that_cannot_be_compared() -> None:
    invoke("in/a.jsonl", "-o", "out/a", "-t", "bytes", "--dedup", "exact")
    words = ["in/c.jsonl", "-o", "out/c", "-t", "bytes", "--dedup", "exact", "--against"]
    with pytest.raises(UserError, match="--against out/a: this is the name of the new set too"):
        invoke(*words, "out/a", "-o", "out/a", "--overwrite")
    with pytest.raises(UserError, match="there is no token set here"):
        invoke(*words, "out/none")
    content = Path("out/a.signatures").read_bytes()
    Path("out/a.signatures").write_bytes(content[:-3] + b"abc")
    with pytest.raises(UserError, match="signatures of a token set are damaged"):
        invoke(*words, "out/a")
    Path("out/a.signatures").unlink()
    for path in Path("out/a.tokenizer").iterdir():
        path.unlink()
    Path("out/a.tokenizer").rmdir()
    with pytest.raises(UserError, match="neither signatures nor a tokenizer"):
        invoke(*words, "out/a")


WRONG = {
    "--dedup-by line": r"--dedup-by: .*\n.*add --dedup",
    "--against x": "--against: this says how duplicates are found",
    "--dedup minhash --dedup-by line": "--dedup-by: minhash compares documents",
    "--dedup exact --dedup-words 3": "--dedup-words: this is a setting of minhash",
    "--dedup exact --dedup-min-length 3": "--dedup-min-length: this is about paragraphs",
    "--dedup exact --dedup-memory 1MB": r"977 KiB are too little",
    "--dedup exact --dedup-memory much": "--dedup-memory: 'much' must be a size",
    "--dedup minhash --dedup-hashes 9999": "--dedup-buckets: 14 buckets of 9999 hashes",
    "--dedup exact --hold-out-end 0.1": "--hold-out-end: the end of a document",
    "--dedup-group --parts 3": "--dedup-group: duplicates are not looked for",
    "--dedup exact --dedup-group": "--dedup-group: this groups all parts",
    "--dedup exact --dedup-group --part 1/3": "--dedup-group: this groups all parts",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options(words: str) -> None:
    with pytest.raises(UserError, match=WRONG[words]):
        invoke("in", "-o", "out/set", "-t", "bytes", *words.split())
    assert not Path("out").exists()
