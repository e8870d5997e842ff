"""A preparation that is killed goes on, and its files are those of one that never was."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.text.prepare.outputs import save_tokenizer
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest, parse_holdout
from gristmill.text.sources.source import ReadOptions
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens.format import write_manifest
from gristmill.tokens.store import verify_tokens

BYTES = ByteTokenizer()
SMALL = ReadOptions(block_bytes=400)


class CrashError(BaseException):
    """Stands for the end of the process."""


def write_lines(path: Path, count: int, *, times: int = 1) -> Path:
    """So many lines, so many times over, which takes less time than other ones."""
    chance = random.Random(count)
    with path.open("w") as file:
        for n in range(count):
            text = "".join(chance.choices("abc é🙂", k=chance.randrange(60)))
            file.write("nonsense\n" if n % 31 == 3 else json.dumps({"text": f"{n}{text}"}) + "\n")
    path.write_text(path.read_text() * times)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", 150)


def run(source: Path, folder: Path, **options: Any) -> list[str]:
    notes: list[str] = []
    heard = {"progress": options.pop("progress")} if "progress" in options else {}
    settings: dict[str, Any] = {"workers": 1, "save_every": 0, "options": SMALL} | options
    request = PrepareRequest([str(source)], folder / "set", BYTES, **settings)
    prepare(request, note=notes.append, **heard)
    return notes


def crash_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    count = itertools.count()

    def maybe(*arguments: Any, **options: Any) -> Any:
        if next(count) == call:
            raise CrashError
        return real(*arguments, **options)

    return maybe


FORMATS: dict[str, dict[str, Any]] = {
    "flat": {},
    "megatron": {"format": "megatron"},
    "llmc": {"format": "llmc", "shard_size": 2000},
    "npy held out": {
        "format": "npy",
        "shard_size": 2000,
        "holdout": parse_holdout("8,2", seed=3),
    },
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.slow if "shard_size" in options else ())
        for name, options in FORMATS.items()
    ],
)
@pytest.mark.parametrize("function", ["fsync", pytest.param("replace", marks=pytest.mark.slow)])
def test_a_crash_at_any_write_or_rename(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    function: str,
) -> None:
    source = write_lines(tmp_path / "in.jsonl", 80)
    run(source, tmp_path / "whole", **options)
    expected = files_of(tmp_path / "whole")
    real = getattr(os, function)
    chance = random.Random(0)
    calls, went_on = 0, 0
    for attempt in range(1000):
        folder = tmp_path / str(attempt)
        with monkeypatch.context() as patched:
            patched.setattr(os, function, crash_at(calls, real))
            try:
                run(source, folder, **options)
            except CrashError:
                pass
            else:
                break
        went_on += len(run(source, folder, **options))
        assert files_of(folder) == expected
        # Every call would take minutes.
        calls += 1 if calls < 6 else chance.randrange(1, 14)
    assert attempt > 6
    assert went_on > attempt / 2


def test_crash_upon_crash(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(source, tmp_path / "whole")
    chance, crashes = random.Random(1), 0
    while True:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", crash_at(chance.randrange(4, 40), os.fsync))
            try:
                run(source, tmp_path / "out")
            except CrashError:
                crashes += 1
                continue
            break
    assert crashes > 2
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


COMMAND = """
import sys
from pathlib import Path
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest, parse_holdout
from gristmill.text.sources.source import ReadOptions
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
if __name__ == "__main__":
    request = PrepareRequest(
        sys.argv[2:], Path(sys.argv[1]), ByteTokenizer(), workers=2,
        save_every=0, options=ReadOptions(block_bytes=2000),
    )
    progress = lambda state: print(state.documents, flush=True)
    prepare(request, note=print, progress=progress)
"""


@pytest.mark.slow
def test_killed_with_its_workers_at_random_moments(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 6_000)
    more = write_lines(tmp_path / "more.jsonl", 1_000)
    script = tmp_path / "go.py"
    script.write_text(COMMAND)
    chance, kills, notes = random.Random(5), 0, 0
    while True:
        output = tmp_path / "out" / "set"
        command = [sys.executable, str(script), str(output), str(source), str(more)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(chance.randrange(5, 100)):
            line = process.stdout.readline()
            notes += "resuming" in line
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        if process.wait() == 0:
            break
        kills += 1
    assert kills > 2
    assert notes > 1
    prepare(PrepareRequest([str(source), str(more)], tmp_path / "whole" / "set", BYTES))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 1000, times=20)
    script = tmp_path / "go.py"
    script.write_text(COMMAND.replace("print(state.documents", "print(*children(), sep=','"))
    script.write_text(
        "import multiprocessing\n"
        "def children(): return [c.pid for c in multiprocessing.active_children()]\n"
        + script.read_text()
    )
    command = [sys.executable, str(script), str(tmp_path / "out" / "set"), str(source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split(",")]
    assert len(pids) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_full_disk_is_a_clear_error_and_the_work_goes_on(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 3000)
    script = tmp_path / "go.py"
    # A limit on the size of files stands for the end of the disk.
    script.write_text(
        "import resource, signal\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        + COMMAND.replace("workers=2", "workers=1")
    )
    command = [sys.executable, str(script), str(tmp_path / "out" / "set"), str(source)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "the disk is full" in ended.stderr
    assert not (tmp_path / "out" / "set.json").exists()
    notes: list[str] = []
    request = PrepareRequest([str(source)], tmp_path / "out" / "set", BYTES)
    prepare(request, note=notes.append)
    assert "resuming" in notes[0]
    prepare(PrepareRequest([str(source)], tmp_path / "whole" / "set", BYTES))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def interrupted(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", crash_at(20, os.fsync))
        with pytest.raises(CrashError):
            run(source, folder, **options)


def test_another_request_is_refused_and_loses_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(source, tmp_path / "out", monkeypatch)
    before = files_of(tmp_path / "out")
    with pytest.raises(UserError, match="differs in: append_eod") as caught:
        run(source, tmp_path / "out", append_end_of_text=False)
    assert caught.value.exit is Exit.REFUSED
    other = write_lines(tmp_path / "other.jsonl", 40)
    with pytest.raises(UserError, match="differs in: sources"):
        run(other, tmp_path / "out")
    assert files_of(tmp_path / "out") == before
    assert run(other, tmp_path / "out", overwrite=True) == []
    run(other, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_overwriting_goes_on_too_and_keeps_the_old_set_until_the_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_lines(tmp_path / "old.jsonl", 30)
    run(old, tmp_path / "out")
    interrupted(source, tmp_path / "out", monkeypatch, overwrite=True)
    assert verify_tokens(tmp_path / "out" / "set") == []
    assert run(source, tmp_path / "out", overwrite=True) != []
    run(source, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_unfinished_files_are_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    interrupted(source, tmp_path / "out", monkeypatch)
    hidden = tmp_path / "out" / ".set.bin.part"
    content = bytearray(hidden.read_bytes())
    content[100] ^= 1
    if damage == "remove":
        hidden.unlink()
    else:
        hidden.write_bytes(content if damage == "flip" else content[:50])
    with pytest.raises(UserError, match="not what was saved"):
        run(source, tmp_path / "out")
    run(source, tmp_path / "out", overwrite=True)
    run(source, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_two_processes_do_not_write_one_set(source: Path, tmp_path: Path) -> None:
    def meanwhile(state: object) -> None:
        with pytest.raises(UserError, match="another process is writing"):
            run(source, tmp_path / "out", overwrite=True)

    run(source, tmp_path / "out", progress=meanwhile, options=ReadOptions())
    assert verify_tokens(tmp_path / "out" / "set") == []


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_second_start_at_the_very_end_touches_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    run(source, tmp_path / "whole", **options)
    seconds = 0

    def meanwhile(real: Callable[..., Any]) -> Callable[..., Any]:
        def second_start(*arguments: Any, **named: Any) -> Any:
            nonlocal seconds
            with monkeypatch.context() as patched:
                for name, function in originals.items():
                    patched.setattr(name, function)
                for overwrite in (False, True):
                    with pytest.raises(UserError, match="another process is writing") as caught:
                        run(source, tmp_path / "out", overwrite=overwrite, **options)
                    assert caught.value.exit is Exit.REFUSED
            seconds += 1
            return real(*arguments, **named)

        return second_start

    originals = {
        "gristmill.tokens.writer.write_manifest": write_manifest,
        "os.replace": os.replace,
        "gristmill.text.prepare.outputs.save_tokenizer": save_tokenizer,
    }
    with monkeypatch.context() as patched:
        for name, function in originals.items():
            patched.setattr(name, meanwhile(function))
        run(source, tmp_path / "out", save_every=1000, **options)
    assert seconds > 5
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    with pytest.raises(UserError, match="already a token set"):
        run(source, tmp_path / "out", **options)


WAITS = """
from pathlib import Path
from gristmill.tokens import writer
real = writer.write_manifest
def wait(*arguments):
    Path({writing!r}).touch()
    open({go!r}).read()
    return real(*arguments)
writer.write_manifest = wait
"""


def test_a_second_process_while_the_manifest_is_written(
    source: Path, tmp_path: Path, begin_gristmill: Callable[..., Any]
) -> None:
    writing, go = tmp_path / "writing", tmp_path / "go"
    os.mkfifo(go)
    words = ("prepare", source, "-o", tmp_path / "out" / "set", "-t", "bytes", "--workers", 1)
    first = begin_gristmill(*words, first=WAITS.format(writing=str(writing), go=str(go)))
    while not writing.exists():
        time.sleep(0.02)
        assert first.process.is_alive()
    second = begin_gristmill(*words).end()
    go.write_text("go")
    assert (first.end().returncode, second.returncode) == (0, Exit.REFUSED)
    assert f"another process is writing this token set (process {first.pid} on" in second.stderr
    assert verify_tokens(tmp_path / "out" / "set") == []


def test_the_lock_of_a_killed_process_is_no_obstacle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for purpose in ("prepare", "writing"):
        (tmp_path / "out" / f".set.{purpose}.lock").write_text("process 1 on elsewhere\n")
    run(source, tmp_path / "out")
    run(source, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_control_c_says_how_to_go_on(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 1000, times=200)
    command = [sys.executable, "-m", "gristmill", "prepare", str(source), "-o",
               str(tmp_path / "out" / "set"), "-t", "bytes", "--workers", "2"]  # fmt: skip
    # Tests that a shell runs in the background ignore Ctrl-C, and their children would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    while not (tmp_path / "out" / ".set.bin.part").exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == "interrupted: run the same command again to resume from what was saved\n"


def test_a_pipe_begins_anew(tmp_path: Path) -> None:
    command = (
        f'yes \'{{"text": "abc"}}\' | head -n 1000 | {sys.executable} -m gristmill prepare - '
        f"-o {tmp_path / 'set'} -t bytes"
    )
    for _ in range(2):
        ended = subprocess.run(
            command + " --overwrite", shell=True, capture_output=True, text=True, check=True
        )
        assert "4,000 tokens in 1,000 documents" in ended.stdout
    assert not list(tmp_path.glob(".*"))
