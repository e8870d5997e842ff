"""A set whose process ends while it puts the files in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.tokens import writer
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.format import TokenSetInfo


class Killed(BaseException):
    """Stands for SIGKILL: what is in place stays there."""


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def publish_only(count: int) -> Callable[[Any], None]:
    """`HashedFile.publish` that is killed after so many files."""
    real, done = writer.HashedFile.publish, []

    def publish(self: writer.HashedFile) -> None:
        if len(done) == count:
            raise Killed
        done.append(real(self))

    return publish


@pytest.mark.parametrize("format", ["flat", "megatron", "npy"])
@pytest.mark.parametrize("files", [0, 1])
def test_a_set_that_was_not_put_in_place_is_replaced(
    format: str, files: int, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    convert_tokens([tokens], tmp_path / "whole/set", format=format)
    monkeypatch.setattr(writer.HashedFile, "publish", publish_only(files))
    with pytest.raises(Killed):
        convert_tokens([tokens], tmp_path / "cut/set", format=format)
    monkeypatch.undo()
    left = {name for name in files_of(tmp_path / "cut") if not name.startswith(".")}
    assert len(left) == files and "set.json" not in left
    convert_tokens([tokens], tmp_path / "cut/set", format=format)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_a_set_without_its_companions_is_replaced_by_the_same_request_alone(
    tokens: Path, tmp_path: Path
) -> None:
    def fail(info: TokenSetInfo) -> None:
        raise Killed

    def note(info: TokenSetInfo) -> None:
        (tmp_path / "set.ledger.json").write_text("{}")

    with pytest.raises(Killed):
        convert_tokens([tokens], tmp_path / "set", companions=fail)
    with pytest.raises(UserError, match="already a token set here") as refused:
        convert_tokens([tokens, tokens], tmp_path / "set", companions=note)
    assert refused.value.exit is Exit.REFUSED
    convert_tokens([tokens], tmp_path / "set", companions=note)
    assert (tmp_path / "set.ledger.json").is_file()
    # From now on it is a set like any other.
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(UserError, match="already a token set here"):
        convert_tokens([tokens], tmp_path / "set", companions=note)


@pytest.mark.parametrize("format", ["flat", "megatron", "npy"])
def test_a_set_that_is_complete_has_no_scratch_files_beside_it(
    format: str, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: writer.TokenWriter) -> None:
        self._lock.release()
        raise Killed

    # Killed after the last file is in place, and before anything is cleaned up.
    monkeypatch.setattr(writer.TokenWriter, "abandon", killed)
    with pytest.raises(Killed):
        convert_tokens([tokens], tmp_path / "set", format=format)
    monkeypatch.undo()
    with pytest.raises(UserError, match="already a token set here"):
        convert_tokens([tokens], tmp_path / "set", format=format)
    assert not list(tmp_path.glob(".*.tmp"))
