"""A tour of the page with whatever server there is: the stand-in, or a real one.

    GRISTMILL_BROWSER_SERVER=http://127.0.0.1:8000 pytest tests/browser/test_page_tour.py

Nothing here depends on what a model says, as long as it says something.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect

ENDED = re.compile("^(Finished|Stopped at the limit|The context is full)")


@pytest.fixture
def models(page: Any) -> list[dict[str, Any]]:
    """What the server has; the page is set to short answers."""
    if not page.locator("#settings").is_visible():
        page.locator("#open-settings").click()
    page.get_by_label("Max tokens").fill("16")
    page.get_by_label("Always the same").check()
    page.keyboard.press("Escape")
    found = page.evaluate("fetch('v1/models').then((answer) => answer.json())")
    return list(found["data"])


def send(page: Any, text: str) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")
    expect(page.locator("#send")).to_be_visible()
    for line in page.locator(".meta").all():
        expect(line).to_have_text(ENDED)


def test_a_text_is_continued_with_probabilities(page: Any, models: list[dict[str, Any]]) -> None:
    page.locator("#mode-prompt").click()
    page.locator("#model").select_option(models[0]["id"])
    page.locator("#probabilities").click()
    send(page, "There was once")
    text = page.locator(".made").text_content()
    assert text
    expect(page.locator("#context")).to_have_text(re.compile(r"^[\d,]+ of [\d,]+ tokens$"))
    assert "".join(page.locator(".token").all_text_contents()) == text
    page.locator(".token").first.focus()
    rows = page.locator("#token-card .share")
    # The likeliest five, and the token itself if it is another.
    assert rows.count() in (5, 6)
    shares = [float(share.strip("<%")) for share in rows.all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    page.keyboard.press("Escape")
    # The same seed says the same, and both stay.
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".count")).to_have_text("2/2")
    expect(page.locator(".meta")).to_have_text(ENDED)
    assert page.locator(".made").text_content() == text
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".meta")).to_contain_text("seeds")
    expect(page.locator(".meta")).to_have_text(ENDED)
    assert page.locator(".made").text_content().startswith(text)


def test_two_models_beside_each_other(page: Any, models: list[dict[str, Any]]) -> None:
    page.locator("#mode-prompt").click()
    page.get_by_role("button", name="Compare").click()
    page.locator("#model").select_option(models[0]["id"])
    page.locator("#other-model").select_option(models[0]["id"])
    send(page, "There was once")
    expect(page.locator(".parting")).to_have_text("Both are the same.")
    if len(models) > 1:
        page.locator("#other-model").select_option(models[1]["id"])
        page.get_by_role("button", name="Regenerate").click()
        expect(page.locator(".count")).to_have_text("2/2")
        expect(page.locator(".parting")).not_to_be_empty()


def test_a_conversation_and_its_export(
    page: Any, models: list[dict[str, Any]], tmp_path: Path
) -> None:
    able = [model["id"] for model in models if model["chat"]]
    if not able:
        pytest.skip("none of the server's models has a chat template")
    page.locator("#model").select_option(able[0])
    page.locator("#mode-chat").click()
    send(page, "What is a mill?")
    send(page, "And a river?")
    answers = [text.strip() for text in page.locator(".made").all_inner_texts()]
    page.reload()
    expect(page.locator(".user .text")).to_have_text(["What is a mill?", "And a river?"])
    if not page.locator("#library").is_visible():
        page.locator("#open-library").click()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "all.jsonl"
    waiting.value.save_as(file)
    [line] = file.read_text(encoding="utf-8").splitlines()
    messages = json.loads(line)["messages"]
    said = [item["content"].strip() for item in messages if item["role"] == "assistant"]
    assert said == [answer for answer in answers if answer]
