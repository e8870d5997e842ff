"""One bar at a time, and messages as they are."""

from __future__ import annotations

import pytest

from gristmill.cli.progress import DOWNLOADS, ProgressLine


def test_a_bar_inside_another_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressLine("outer") as outer:
        assert outer._bar.live.is_started
        with DOWNLOADS.show("someone/tiny") as update:
            assert outer._bar.live.is_started, "nothing was downloaded yet"
            update(1, 2)
            inner = ProgressLine.shown[-1]
            assert inner.title == "downloading someone/tiny"
            assert (inner._bar.live.is_started, outer._bar.live.is_started) == (True, False)
        assert (inner._bar.live.is_started, outer._bar.live.is_started) == (False, True)
    assert not outer._bar.live.is_started and ProgressLine.shown == []


def test_messages_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    DOWNLOADS.note("hf:books: [bold] :smile:")
    with ProgressLine("working") as line:
        line.say("a:books:b")
    assert capsys.readouterr().err == "hf:books: [bold] :smile:\na:books:b\n"
