"""All parts run by an engine: whatever dies, the bytes are those of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli import prepare_parts
from gristmill.cli.main import app
from gristmill.text.prepare import parts_run
from gristmill.text.prepare.all_parts import log_pattern
from gristmill.text.prepare.part_status import PartState, part_statuses
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PartNumber, PrepareRequest
from gristmill.text.prepare.work_plan import PrepareProgress
from gristmill.text.sources import corpora
from gristmill.text.sources.corpora import Corpus
from gristmill.text.sources.source import ReadOptions
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": "x" * (1 + n % 37), "title": f"number {n}"}) for n in range(200)]
    lines[50] = "bad"
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines[:120]))
    (tmp_path / "in" / "b.jsonl").write_text("\n".join(lines[120:]))
    (tmp_path / "in" / "c.txt").write_text("a document by itself")


def files_of(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def invoke(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["prepare", *words])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@dataclass
class HereTasks:
    """An engine that does each part in this process, unless a test decides otherwise."""

    arguments: Sequence[str]
    instead: Callable[[int, int], int | str | None] = lambda number, attempt: "run"
    """What a part ends with, at which attempt; "run" runs it."""
    name: str = "here"
    poll_seconds: float = 0.0
    running: Collection[int] = ()
    chooses_machine: bool = True
    submitted: Collection[int] = ()
    """What an earlier process is taken to have submitted."""
    started: list[int] = field(default_factory=list)
    _ended: dict[int, int | None] = field(default_factory=dict)

    def attach(self, jobs: Mapping[str, Any]) -> Collection[int]:
        for number in self.submitted:
            self._run(number)
        return self.submitted

    def start(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.started.append(number)
            self._run(number)

    def _run(self, number: int) -> None:
        status = self.instead(number, self.started.count(number))
        if status == "run":
            result = CliRunner().invoke(app, [*self.arguments, str(number)])
            error = result.exception
            status = error.exit if isinstance(error, UserError) else result.exit_code
        assert not isinstance(status, str)
        self._ended[number] = status

    def jobs(self) -> Mapping[str, Any]:
        return {"numbers": self.started}

    def poll(self) -> Mapping[int, int | None]:
        ended, self._ended = self._ended, {}
        return ended

    def end(self, number: int) -> None:
        raise AssertionError("no part hangs or lags")

    def stop(self) -> str:
        return "stopped"


@dataclass
class SlowTasks(HereTasks):
    """An engine whose tasks run for a moment; some of them hang at their first attempt."""

    hanging: Collection[int] = ()
    moment: float = 0.15
    ended: list[int] = field(default_factory=list)
    _until: dict[int, float] = field(default_factory=dict)

    def start(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.started.append(number)
            hangs = number in self.hanging and self.started.count(number) == 1
            self._until[number] = time.monotonic() + (1e9 if hangs else self.moment)
        self.running = self._until.keys()

    def poll(self) -> Mapping[int, int | None]:
        for number in [n for n, due in self._until.items() if time.monotonic() > due]:
            del self._until[number]
            self._run(number)
        return super().poll()

    def end(self, number: int) -> None:
        self.ended.append(number)
        del self._until[number]
        self._ended[number] = -9


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[HereTasks]]:
    """Let `--engine local` do the parts in this process; the engines that were made."""

    def use(kind: type[HereTasks] = HereTasks, **settings: Any) -> list[HereTasks]:
        made: list[HereTasks] = []

        def build(arguments: Sequence[str], options: Any, **places: Any) -> HereTasks:
            made.append(kind(arguments, **settings))
            return made[-1]

        monkeypatch.setattr(prepare_parts, "_build_engine", build)
        return made

    return use


KINDS = {
    "flat": ["-o", "{}/set"],
    "megatron": ["-o", "{}/set", "--format", "megatron"],
    "llmc": ["-o", "{}/set", "--format", "llmc", "--shard-size", "300"],
    "npy": ["-o", "{}/set", "--format", "npy", "--shard-size", "300"],
    "held out": ["-o", "{}/set", "--split", "7,2,1", "--seed", "3"],
    "filtered": ["-o", "{}/set", "--filter", "length=9,words=bad.txt", "--decontaminate=bad.txt"],
    "two keys": [
        "-o",
        "{}/set-{{split}}",
        "--split",
        "8,2",
        "--json-keys=text",
        "--json-keys=title",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_one_process(kind: str, here: Callable[..., list[HereTasks]]) -> None:
    here()
    Path("bad.txt").write_text("nothing that any of these small texts would ever say\n")
    for folder, parts in (("one", []), ("many", ["--parts", "5", "--engine", "local"])):
        words = [word.format(folder) for word in KINDS[kind]]
        said = invoke("in", *words, "-t", "bytes", *parts)
    assert files_of("many") == files_of("one")
    assert ("200 kept + 1 dropped" in said) == (kind != "filtered")


def test_parts_without_documents(here: Callable[..., list[HereTasks]]) -> None:
    here()
    for folder, parts in (("one", []), ("many", ["--parts", "12", "--engine", "local"])):
        invoke("in/c.txt", "-o", f"{folder}/set", "-t", "bytes", *parts)
    assert files_of("many") == files_of("one")
    Path("empty.jsonl").write_text("{}\n{}\n{}\n")
    with pytest.raises(UserError, match=r"no document was found in 3 lines \(3 missing key\)"):
        invoke("empty.jsonl", "-o", "none/set", "-t", "bytes", "--parts=2", "--engine=local")
    assert files_of("none") == {}


def test_a_corpus_by_name(
    tmp_path: Path, here: Callable[..., list[HereTasks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    where = {"homepage": "https://example.invalid", "url": "https://example.invalid/small.jsonl"}
    small = Corpus("small", "A small one", licence="CC0", held_out=0.1, seed=4, **where)
    monkeypatch.setattr(corpora, "known_corpora", lambda: {"small": small})
    small.file.parent.mkdir(parents=True)
    small.file.write_bytes(Path("in/a.jsonl").read_bytes())
    here()
    for folder, parts in (("one", []), ("many", ["--parts", "4", "--engine", "local"])):
        invoke("small", "-o", f"{folder}/set", "-t", "bytes", *parts)
    assert files_of("many") == files_of("one") and Path("many/set_val.bin").is_file()


def test_logs_of_all_parts() -> None:
    request = PrepareRequest(["in"], Path("100%/{split}"), BYTES)
    assert log_pattern(request, 12) % 3 == "100%/all.part-03-of-12.log"


def test_what_dies_runs_again_and_what_fails_does_not(
    here: Callable[..., list[HereTasks]],
) -> None:
    words = ("in", "-o", "many/set", "-t", "bytes", "--parts=3", "--engine=local")
    died = {(1, 1): -9, (3, 1): None, (3, 2): 1}
    made = here(instead=lambda *one: died.get(one, "run"))
    said = invoke(*words)
    assert made[0].started == [1, 2, 3, 1, 3, 3]
    assert "part 1/3 ended by signal 9; attempt 2 of 3 begins" in said
    assert "part 3/3 ended with its machine; attempt 2 of 3 begins" in said
    invoke("in", "-o", "one/set", "-t", "bytes")
    assert files_of("many") == files_of("one")


def test_too_many_deaths_are_a_failure_and_the_rest_is_kept(
    here: Callable[..., list[HereTasks]],
) -> None:
    words = ("in", "-o", "many/set", "-t", "bytes", "--parts=3", "--engine=local")
    made = here(instead=lambda number, attempt: -9 if number == 2 else "run")
    with pytest.raises(UserError, match=r"part 2/3 failed: .*signal 9, after 2 attempts") as error:
        invoke(*words, "--attempts", "2")
    assert error.value.exit == Exit.PEER and made[0].started == [1, 2, 3, 2]
    states = [status.state for status in part_statuses(Path("many/set"))]
    assert states == [PartState.DONE, PartState.FAILED, PartState.DONE]
    # Only what is missing runs again.
    made = here()
    assert "3 parts, 2 done before" in invoke(*words)
    assert made[0].started == [2]
    invoke("in", "-o", "one/set", "-t", "bytes")
    assert files_of("many") == files_of("one")


@pytest.mark.parametrize("how", ["hangs", "lags"])
def test_a_part_that_hangs_or_lags_is_started_anew(
    here: Callable[..., list[HereTasks]], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(parts_run, "_COUNT_EVERY", 0.02)
    monkeypatch.setattr(parts_run, "_HANGS" if how == "hangs" else "_LAGS_LEAST", 0.4)
    invoke("in", "-t", "bytes", "-o", "whole/set")
    made = here(SlowTasks, hanging=(2,), chooses_machine=how == "lags")
    told = invoke("in", "-t", "bytes", "-o", "parts/set", "--parts", "4", "--engine", "local")
    (engine,) = made
    assert isinstance(engine, SlowTasks)
    assert engine.ended == [2]
    assert engine.started == [1, 2, 3, 4, 2]
    words = "has written nothing for" if how == "hangs" else "lags behind: 0% after"
    assert words in told
    assert files_of("parts") == files_of("whole")


def test_a_part_is_not_ended_for_ever(
    here: Callable[..., list[HereTasks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one attempt left, a slow part may still end by itself."""
    monkeypatch.setattr(parts_run, "_COUNT_EVERY", 0.02)
    monkeypatch.setattr(parts_run, "_HANGS", 0.1)
    made = here(SlowTasks, moment=0.6)
    words = ["in", "-t", "bytes", "-o", "parts/set", "--parts", "2", "--engine", "local"]
    invoke(*words, "--attempts", "1")
    (engine,) = made
    assert isinstance(engine, SlowTasks)
    assert (engine.ended, engine.started) == ([], [1, 2])


def test_what_was_submitted_is_not_started_twice(here: Callable[..., list[HereTasks]]) -> None:
    words = ("in", "-o", "many/set", "-t", "bytes", "--parts=3", "--engine=local")
    made = here(submitted=[1, 3])
    invoke(*words)
    assert made[0].started == [2]


def test_jobs_of_another_engine_are_not_joined(here: Callable[..., list[HereTasks]]) -> None:
    words = ("in", "-o", "many/set", "-t", "bytes", "--parts=3", "--engine=local")
    here(instead=lambda number, attempt: -9, name="slurm")
    with pytest.raises(UserError, match="signal 9"):
        invoke(*words)
    here(name="ray")
    with pytest.raises(UserError, match="parts may still run that --engine slurm") as error:
        invoke(*words)
    assert error.value.exit == Exit.REFUSED


def test_a_lock_of_a_lost_process_is_waited_for(
    here: Callable[..., list[HereTasks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.text.prepare.parts_run._AGAIN", 0.0)

    def instead(number: int, attempt: int) -> int | str | None:
        if number == 2 and attempt in (2, 3):
            Path("many/.set.part-2-of-3.prepare.lock").write_text("process 1 on elsewhere")
            return int(Exit.REFUSED)
        return None if (number, attempt) == (2, 1) else "run"

    made = here(instead=instead)
    words = ("in", "-o", "many/set", "-t", "bytes", "--parts=3", "--engine=local")
    invoke(*words)
    assert made[0].started == [1, 2, 3, 2, 2, 2]


def test_killed_while_merging_or_removing(
    here: Callable[..., list[HereTasks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("in", "-o", "many/set", "--split=9,1", "-t", "bytes", "--parts=3", "--engine=local")
    invoke("in", "-o", "one/set", "--split=9,1", "-t", "bytes")
    for place in ("_verify", "remove_part"):
        here()
        with monkeypatch.context() as patch:
            patch.setattr(f"gristmill.text.prepare.all_parts.{place}", fail)
            result = CliRunner().invoke(app, ["prepare", *words])
            assert isinstance(result.exception, SystemError)
        # A set that stands there now was made by this command, and may be replaced.
        made = here()
        invoke(*words)
        assert made[0].started == []
        assert files_of("many") == files_of("one")
        for path in Path("many").glob("*.*"):
            path.unlink(missing_ok=True) if path.is_file() else None


def fail(*arguments: object, **named: object) -> None:
    raise SystemError("killed here")


def test_another_command_or_other_sources(here: Callable[..., list[HereTasks]]) -> None:
    common = ("-o", "many/set", "-t", "bytes", "--parts=3", "--engine=local")
    here(instead=lambda number, attempt: -9 if number == 2 else "run")
    with pytest.raises(UserError, match="signal 9"):
        invoke("in", *common)
    here()
    with pytest.raises(UserError, match="it differs in: append_eod"):
        invoke("in", *common, "--no-append-eod")
    Path("in/b.jsonl").write_text(Path("in/b.jsonl").read_text().replace("x", "y"))
    made = here()
    invoke("in", *common)
    # The third part has read what changed; the first has not.
    assert 1 not in made[0].started and {2, 3} == set(made[0].started)
    invoke("in", "-o", "one/set", "-t", "bytes")
    assert files_of("many") == files_of("one")
    with pytest.raises(UserError, match="already a token set here"):
        invoke("in", *common)
    invoke("in", *common, "--overwrite", "--no-append-eod")
    invoke("in", "-o", "one/set", "-t", "bytes", "--overwrite", "--no-append-eod")
    assert files_of("many") == files_of("one")


WRONG = {
    "--part 2/3 --parts 3 --engine local": r"--part 2/3: an engine runs all parts",
    "--engine local": r"the number of parts is not given",
    "--parts 1 --engine local": "one part is the whole",
    "--at-once 2": "--at-once: .*no engine",
    "--parts 3 --engine local --ray-address x": "only --engine ray",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options(words: str) -> None:
    with pytest.raises(UserError, match=WRONG[words]):
        invoke("in", "-o", "many/set", "-t", "bytes", *words.split())
    assert not Path("many").exists()


@pytest.mark.parametrize("source", ["-", "hf:some/dataset", "openwebtext"])
def test_sources_without_a_size(source: str) -> None:
    with pytest.raises(UserError, match="cannot be divided into parts"):
        invoke(source, "-o", "many/set", "-t", "bytes", "--parts=3", "--engine=local")
    with pytest.raises(UserError, match="this source holds the output"):
        invoke("in", "-o", "in/set", "-t", "bytes", "--parts=3", "--engine=local")


def test_every_option_reaches_the_parts(here: Callable[..., list[HereTasks]]) -> None:
    made = here(instead=lambda number, attempt: int(Exit.CONFIG))
    words = ["--separator=-- x", "--json-keys=a", "--json-keys=b", "--no-append-eod", "--strict"]
    words += ["--on-damage=skip", "--format=npy", "--shard-size=7", "--split=1,1", "--seed=5"]
    words += ["--overwrite", "--tokenizer=bytes", "--end-of-text=x", "--output=many/set"]
    more = ["--workers=2", "--parts=3", "--engine=local", "--attempts=1", "--at-once=2", "--quiet"]
    with pytest.raises(UserError):
        invoke("in", *words, *more, "in/a.jsonl")
    tail = ["--workers", "2", "--parts", "3", "--part"]
    given = made[0].arguments
    assert given[0] == "prepare" and list(given[-len(tail) :]) == tail
    assert sorted(given[1 : -len(tail)]) == sorted([*words, "in", "in/a.jsonl"])


# ------------------------------------------------------------------ --status


def test_status_of_parts_that_were_run_by_hand() -> None:
    with pytest.raises(UserError, match="no parts of a token set here"):
        invoke("-o", "many/set", "--status")
    for number in (1, 3):
        prepare(PrepareRequest(["in"], Path("many/set"), BYTES, part=PartNumber(number, 3)))
    part = PrepareRequest(["in"], Path("many/set"), BYTES, part=PartNumber(2, 3))
    small = replace(part, options=ReadOptions(block_bytes=100), save_every=0, workers=1)
    with pytest.raises(RuntimeError):
        prepare(small, progress=during_progress)
    shown = json.loads(invoke("in", "-o", "many/set", "--status", "--json", code=Exit.STOPPED))
    assert [one["state"] for one in shown["status"]] == ["done", "interrupted", "done"]
    assert shown["counts"] == {"done": 2, "interrupted": 1} and not shown["complete"]
    said = invoke("-o", "many/set", "--status", "--parts", "4", code=Exit.STOPPED)
    assert "4 parts: 4 missing" in said
    prepare(PrepareRequest(["in"], Path("many/set"), BYTES, part=PartNumber(2, 3)))
    assert "3 parts: 3 done; 200 documents" in invoke("-o", "many/set", "--status")
    Path("many/set.part-2-of-3.json").unlink()
    assert "2 done, 1 missing" in invoke("-o", "many/set", "--status", code=Exit.STOPPED)
    # Merged by hand, and the parts removed.
    invoke("in", "-o", "many/set", "-t", "bytes")
    for path in Path("many").glob("set.part-*.json"):
        path.unlink()
    assert "complete, no parts are left: many/set" in invoke("-o", "many/set", "--status")


def during_progress(state: PrepareProgress) -> None:
    said = invoke("-o", "many/set", "--status", code=Exit.STOPPED)
    assert "2/3       running     " in said and f"process {os.getpid()} on " in said
    if state.documents > 10:
        raise RuntimeError("killed here")


def test_a_part_that_is_done_is_not_done_again() -> None:
    words = ("in", "-o", "many/set", "-t", "bytes", "--part", "2/3")
    invoke(*words)
    before = Path("many/set.part-2-of-3.bin").stat().st_mtime_ns
    assert "part 2/3 is already done" in invoke(*words)
    assert Path("many/set.part-2-of-3.bin").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="a different command made this part") as error:
        invoke(*words, "--no-append-eod")
    assert error.value.exit == Exit.REFUSED


# ------------------------------------------------------------------ real processes

INJECTED = """
import os, signal, sys, time
from pathlib import Path
if sys.argv[1:2] == ["prepare"] and sys.argv[-2:] == ["--part", "2"]:
    from gristmill.text.prepare import journal
    real = journal.Journal.save
    def save(self, *arguments):
        real(self, *arguments)
        marker = Path(os.environ["MARKER"])
        if not marker.exists():
            marker.write_text(str(os.getpid()))
            if "kill" in marker.name:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
    journal.Journal.save = save
"""
"""Ends or holds part 2 at the first moment from which it can resume."""


def start(tmp_path: Path, marker: str, *words: str) -> subprocess.Popen[str]:
    (tmp_path / "inject").mkdir(exist_ok=True)
    # Where -m finds the program first.
    (tmp_path / "inject" / "sitecustomize.py").write_text(
        f"import sys\nsys.argv = getattr(sys, 'orig_argv', [])[2:]\n{INJECTED}"
    )
    source = str(Path(prepare_parts.__file__).parents[2])
    environment = {**os.environ, "MARKER": marker, "PYTHONPATH": f"{tmp_path}/inject:{source}"}
    command = [sys.executable, "-m", "gristmill", "prepare", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> int:
    while not path.exists() or not path.read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    return int(path.read_text())


def wait_until_gone(process: int) -> None:
    while Path(f"/proc/{process}").exists():
        time.sleep(0.02)


PARTS = ("in", "-o", "many/set", "-t", "bytes", "--parts", "3", "--engine", "local")


def test_a_part_killed_in_mid_run(tmp_path: Path) -> None:
    process = start(tmp_path, "kill", *PARTS, "--at-once", "3")
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert "part 2/3 ended by signal 9; attempt 2 of 3 begins" in said
    invoke("in", "-o", "one/set", "-t", "bytes")
    assert files_of("many") == files_of("one")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_the_coordinator_ends_and_runs_again(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "hold", *PARTS, "--at-once", "1")
    part = wait_for(Path("hold"), process)
    second = invoke("-o", "many/set", "--status", code=Exit.STOPPED)
    assert "1 done, 1 running, 1 missing" in second
    with pytest.raises(UserError, match="another process is writing this token set"):
        invoke(*PARTS)
    process.send_signal(number)
    said = process.communicate()[1]
    wait_until_gone(part)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        expected = Exit.STOPPED if number == signal.SIGTERM else 130
        assert process.returncode == expected
        assert "1 running parts were stopped; their work is kept" in said
        assert "run the same command again to resume" in said
        return
    assert not Path("many/set.json").exists()
    again = start(tmp_path, "hold", *PARTS)
    said = again.communicate()[1]
    assert again.returncode == 0, said
    assert "3 parts, 1 done before" in said
    invoke("in", "-o", "one/set", "-t", "bytes")
    assert files_of("many") == files_of("one")


def test_bad_data_is_told_once_with_the_part_and_its_log(tmp_path: Path) -> None:
    process = start(tmp_path, "none", *PARTS, "--strict")
    Path("none").write_text("0")
    said = process.communicate()[1]
    assert process.returncode == Exit.DATA
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "part 1/3 failed: in/a.jsonl:51: this line gives no document: invalid json" in errors[0]
    assert "many/set.part-1-of-3.log" in errors[0]
    assert "leave out --strict" in said
