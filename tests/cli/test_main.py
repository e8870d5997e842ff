"""How the program ends when something happens that nobody expected."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.cli.main import main
from gristmill.strategies.spmd import Spmd

End = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> End:
    """Run a command line: its exit status, and the lines that it left on standard error."""

    def run(*words: object) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["gristmill", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, capfd.readouterr().err.splitlines()

    return run


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Let the commands that read a run file meet an error."""

    def arrange(error: BaseException) -> None:
        def fail(*words: object, **options: object) -> None:
            raise error

        for command in ("train", "inspect"):
            monkeypatch.setattr(f"gristmill.cli.{command}.load_run", fail)

    return arrange


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no\nsuch  grain"), "ValueError: no such grain"),
        (AssertionError(), "AssertionError"),
        (EOFError("the sack is empty"), "EOFError: the sack is empty"),
        (BrokenPipeError(32, "the chute is broken"), r"BrokenPipeError: \[Errno 32\] the chute .*"),
        (RuntimeError("long " * 1000), "RuntimeError: (long )+l…"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("verb", ["train", "config"])
def test_a_defect_ends_with_70_and_says_so_last(
    end: End, raising: Callable[[BaseException], None], verb: str, error: Exception, words: str
) -> None:
    raising(error)
    status, lines = end(verb, "run.toml")
    assert status == 70
    assert lines[0] == "Traceback (most recent call last):"
    assert any("in fail" in line for line in lines)
    last = rf"error: a defect of gristmill \S+: {words}; please report it, with the command and "
    assert re.fullmatch(f"{last}the traceback above", lines[-1]), lines[-1]
    assert len(lines[-1]) < 500


def test_a_mistake_has_no_traceback(end: End, raising: Callable[[BaseException], None]) -> None:
    raising(UserError("no such grain", where="the sack", remedy="look again"))
    assert end("train", "run.toml") == (78, ["error: the sack: no such grain", "    look again"])


def test_a_full_disk_is_no_defect_wherever_it_is_met(
    end: End, raising: Callable[[BaseException], None]
) -> None:
    raising(OSError(errno.EDQUOT, "Disk quota exceeded", "/tmp/sack"))
    assert end("config", "run.toml") == (
        74,
        ["error: /tmp/sack: the disk refused: Disk quota exceeded"],
    )


def test_control_c_ends_with_130_without_a_word(
    end: End, raising: Callable[[BaseException], None]
) -> None:
    raising(KeyboardInterrupt())
    assert end("train", "run.toml") == (130, [])


def test_a_defect_of_training_names_the_log(
    end: End, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = Spmd.accumulate, 0

    def wrong(self: Spmd, *words: object) -> object:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise ZeroDivisionError("the stones touch")
        return real(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(Spmd, "accumulate", wrong)
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(f"""
        name = "corn"
        folder = "{folder}"
        model = {{ layers = 1, heads = 2, width = 16, context = 16 }}
        data.paths = "{tokens}"
        train = {{ until = "6 steps", batch = 2 }}
        runtime = {{ device = "cpu", threads = 1 }}
    """)
    status, lines = end("train", file)
    assert status == 70
    assert f"ZeroDivisionError: the stones touch (the log is {folder / 'train.log'}); " in lines[-1]
    assert "failed at step 2: the stones touch" in (folder / "train.log").read_text()


def test_nothing_is_said_to_a_reader_that_went_away() -> None:
    command = [sys.executable, "-m", "gristmill", "config", "--presets"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_a_source_tree_without_metadata_does_not_hide_the_error(
    end: End, raising: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    raising(ValueError("no such grain"))
    status, lines = end("config", "run.toml")
    assert status == 70
    defect = "error: a defect of gristmill (source tree, not installed): ValueError: no such grain"
    assert lines[-1].startswith(defect)
    assert end("--version")[0] == 0


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files("gristmill").joinpath("py.typed").is_file()
