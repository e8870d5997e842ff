"""Who may ask: addresses, files of keys, ports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.base.errors import DataError, UserError
from gristmill.web.access import is_local, read_keys, require_keys
from gristmill.web.fields import shown
from gristmill.web.server import bind


def test_values_are_shown_however_deep_they_are() -> None:
    deep = json.loads("[" * 900 + "]" * 900)
    assert shown(deep) == "[" * 59 + "…"
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "an array"


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False),
     ("::", False), ("192.168.1.4", False), ("mill.example", False), ("", False)],
)  # fmt: skip
def test_a_server_for_others_needs_keys(host: str, local: bool) -> None:
    assert is_local(host) == local
    require_keys(host, [b"key"])
    if local:
        require_keys(host, [])
    else:
        with pytest.raises(UserError, match="API keys"):
            require_keys(host, [])


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(DataError, match="cannot be read"):
        read_keys(file)
    file.write_text("# nobody\n\n")
    with pytest.raises(DataError, match="no API keys"):
        read_keys(file)
    file.write_text("# people\n one \n\ntwo\n")
    file.chmod(0o600)
    assert read_keys(file) == ([b"one", b"two"], [])
    file.chmod(0o644)
    (note,) = read_keys(file)[1]
    assert "chmod 600" in note


def test_a_port_that_is_in_use() -> None:
    taken = bind("127.0.0.1", 0)
    with taken, pytest.raises(UserError, match="another program uses this port"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError):
        bind("no such host.example", 1)
