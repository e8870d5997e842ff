"""What the page does when the server is away, busy, guarded, loading, or falls over."""

from __future__ import annotations

import re
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect

FAILED = "Failed to load resource"
"""What the browser writes about every request that fails."""


def write(page: Any, text: str) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")


def done(page: Any) -> None:
    expect(page.locator(".meta").last).to_contain_text("Finished")


@pytest.fixture(autouse=True)
def _expected(watched: Any) -> None:
    watched.expected = (FAILED,)


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_a_key_is_asked_for_and_kept_for_the_tab(visit: Any, fake: Any, size: str) -> None:
    fake.plan.key = "open sesame"
    page = visit(size, ready=False)
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog.get_by_label("API key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The server does not accept this key.")
    page.keyboard.type("open sesame")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#send")).to_be_enabled()
    write(page, "Hello")
    done(page)
    page.reload()
    expect(page.locator("#model")).to_have_value("tour")
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "open sesame" not in kept.split("},{")[0] and "open sesame" in kept


def test_without_a_key_the_page_is_still_there(visit: Any, fake: Any) -> None:
    fake.plan.key = "open sesame"
    page = visit(ready=False)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("The server asks for an API key.")).to_be_visible()
    page.get_by_role("button", name="Enter the key").click()
    expect(page.get_by_role("dialog").get_by_label("API key")).to_be_focused()
    page.keyboard.type("open sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_value("tour")
    expect(page.get_by_text("The server asks for an API key.")).to_be_hidden()


def test_a_key_that_is_needed_in_the_middle(wide: Any, fake: Any) -> None:
    fake.plan.key = "open sesame"
    write(wide, "Hello")
    wide.get_by_role("dialog").get_by_label("API key").fill("open sesame")
    wide.keyboard.press("Enter")
    done(wide)


def test_a_busy_server_is_asked_again(page: Any, fake: Any) -> None:
    fake.plan.refuse = [(429, "All places are taken.", {"Retry-After": "1"})]
    write(page, "Hello")
    expect(page.locator(".meta")).to_contain_text("All places are taken. Trying again in 1 s.")
    done(page)
    assert len(fake.bodies) == 2 and fake.bodies[0] == fake.bodies[1]


def test_waiting_can_be_cut_short_or_given_up(wide: Any, fake: Any) -> None:
    fake.plan.refuse = [(429, "Taken.", {"Retry-After": "300"})]
    write(wide, "Hello")
    expect(wide.locator(".meta")).to_contain_text(re.compile(r"Trying again in \d+ s"))
    wide.get_by_role("button", name="Try now").click()
    done(wide)
    fake.plan.refuse = [(503, "A model is loading.", {"Retry-After": "300"})]
    write(wide, "And now?")
    expect(wide.locator(".meta").last).to_contain_text("A model is loading. Trying again in")
    wide.keyboard.press("Escape")
    expect(wide.locator(".meta").last).to_contain_text("Stopped by you")
    wide.get_by_role("button", name="Try again").click()
    done(wide)
    # A try that brought nothing is no branch.
    expect(wide.locator(".count")).to_have_count(0)


def test_a_refusal_is_shown_in_the_words_of_the_server(wide: Any, fake: Any) -> None:
    fake.plan.refuse = [(400, "the prompt has 2,000 tokens <b>too</b> many", {})]
    write(wide, "Hello")
    expect(wide.locator(".meta")).to_have_text("The prompt has 2,000 tokens <b>too</b> many")
    # The next message does not build on an answer that never came.
    write(wide, "Shorter")
    done(wide)
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "Shorter"}]
    expect(wide.get_by_role("button", name="Previous of 2 messages")).to_be_visible()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (503, "model_unusable", "The model tour cannot be loaded; the server's log says why"),
        (504, "timeout", "The request took longer than 600 seconds"),
    ],
)
def test_what_will_not_pass_by_waiting_is_said_at_once(
    wide: Any, fake: Any, status: int, code: str, message: str
) -> None:
    fake.plan.refuse, fake.plan.code = [(status, message, {})], code
    write(wide, "Hello")
    expect(wide.locator(".meta")).to_have_text(message)
    expect(wide.get_by_text("The server does not answer")).to_have_count(0)
    assert len(fake.bodies) == 1
    wide.get_by_role("button", name="Try again").click()
    done(wide)


@pytest.mark.parametrize(
    ("how", "words"),
    [("fail_after", "the engine fell over"), ("cut_after", "The connection was lost.")],
)
def test_an_error_in_a_stream_keeps_the_text(page: Any, fake: Any, how: str, words: str) -> None:
    setattr(fake.plan, how, 5)
    write(page, "Hello")
    expect(page.locator(".meta")).to_contain_text(f"Broke off: {words}")
    text = page.locator(".made").inner_text()
    assert len(text.split()) == 5
    setattr(fake.plan, how, None)
    page.reload()
    expect(page.locator(".made")).to_have_text(text)
    page.get_by_role("button", name="Continue").click()
    done(page)
    whole = page.locator(".made").inner_text()
    assert whole.startswith(text) and len(whole.split()) == 12


def test_a_server_that_is_away_and_comes_back(visit: Any, fake: Any) -> None:
    page = visit()
    write(page, "Hello")
    done(page)
    fake.stop()
    try:
        write(page, "Are you there?")
        expect(page.locator(".meta").last).to_contain_text("The server does not answer.")
        expect(page.get_by_role("alert")).to_contain_text("Trying again every 3 seconds")
        # What there is can be read, searched and edited meanwhile.
        expect(page.locator(".made").first).to_be_visible()
    finally:
        fake.start()
    page.get_by_role("button", name="Try now").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_role("button", name="Try again").click()
    done(page)


def test_what_is_sent_before_the_models_are_known_waits_for_them(visit: Any, fake: Any) -> None:
    fake.plan.key = "open sesame"
    page = visit(ready=False)
    page.get_by_role("button", name="Cancel").click()
    write(page, "Hello")
    assert fake.bodies == []
    expect(page.locator("#draft")).to_have_value("Hello")
    fake.plan.key = None
    page.get_by_role("button", name="Enter the key").click()
    done(page)
    expect(page.locator("#draft")).to_have_value("")


def test_a_page_that_is_opened_before_the_server_has_models(visit: Any, fake: Any) -> None:
    fake.plan.models = []
    page = visit(ready=False)
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#draft")).to_be_editable()


def test_the_page_works_below_a_path(visit: Any, fake: Any) -> None:
    page = visit(path="/below/a/path/")
    write(page, "Hello")
    done(page)


def test_a_model_that_loads_says_so(wide: Any, fake: Any) -> None:
    wide.locator("#model").select_option("tour@100")
    fake.plan.hold_after = 0
    write(wide, "Hello")
    expect(wide.locator(".meta")).to_have_text(re.compile("^Loading tour@100"))
    fake.release()
    done(wide)
