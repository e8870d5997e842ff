"""A process ends without taking the interpreter apart, and loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from gristmill.__main__ import quick_exit

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
kept.itself = kept
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread done"))).start()
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.1), print("pool done")))
sys.stdout.write("no line")
quick_exit(7)
print("returned")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def test_threads_end_functions_run_and_output_is_written() -> None:
    ended = run("-c", PROGRAM)
    assert ended.returncode == 7
    assert ended.stderr == ""
    assert ended.stdout == "no linepool done\nthread done\nat exit\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gristmill", "--version"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert ended.returncode != 0
    assert b"No space left" in ended.stderr


@pytest.mark.parametrize(("words", "status"), [(("--version",), 0), (("mill",), 2)])
def test_the_program_ends_with_the_status_of_the_command(
    words: tuple[str, ...], status: int
) -> None:
    assert run("-m", "gristmill", *words).returncode == status
