"""Probabilities of tokens, and two models side by side."""

from __future__ import annotations

import re
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


def send(page: Any, text: str, *, wait: bool = True) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")
    if wait:
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".meta").last).to_contain_text("Finished")


CARD = "#token-card"


def test_each_token_is_shaded_and_shows_its_alternatives(page: Any, fake: Any) -> None:
    page.locator("#probabilities").click()
    send(page, "What is a mill?")
    assert fake.bodies[0]["top_logprobs"] == 5
    tokens = page.locator(".token")
    expect(tokens).to_have_count(12)
    assert set(tokens.evaluate_all("(all) => all.map((one) => one.dataset.level)")) <= set("01234")
    card = page.locator(CARD)
    if page.viewport_size["width"] > 900:
        tokens.nth(4).hover()
    else:
        tokens.nth(4).tap()
    expect(card).to_be_visible()
    expect(card.locator("li")).to_have_count(5)
    expect(card.locator(".card-head strong")).to_have_text(re.compile(r"^\d+(\.\d+)?%$"))
    word = tokens.nth(4).inner_text().strip()
    expect(card.locator(".mine code")).to_have_text(f"␣{word}")
    box = card.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]


def test_tokens_by_keyboard(wide: Any, fake: Any) -> None:
    wide.locator("#probabilities").click()
    send(wide, "What is a mill?")
    tokens = wide.locator(".token")
    tokens.first.focus()
    wide.keyboard.press("ArrowRight")
    wide.keyboard.press("ArrowRight")
    expect(tokens.nth(2)).to_be_focused()
    expect(tokens.nth(2)).to_have_attribute("aria-describedby", "token-card")
    expect(tokens.nth(2)).to_have_attribute("aria-label", re.compile(r"^␣\w+: [\d.]+%$"))
    expect(wide.locator(CARD)).to_be_visible()
    wide.keyboard.press("End")
    expect(tokens.nth(11)).to_be_focused()
    wide.keyboard.press("Escape")
    expect(wide.locator(CARD)).to_be_hidden()
    # An answer is one stop of the tab key, not one for each token.
    wide.keyboard.press("Tab")
    assert wide.evaluate("document.activeElement.closest('.made')") is None


def test_probabilities_can_be_switched_on_later(wide: Any, fake: Any) -> None:
    wide.locator("#mode-prompt").click()
    send(wide, "There was")
    assert fake.bodies[0]["logprobs"] == 0
    expect(wide.locator(".token")).to_have_count(0)
    wide.locator("#probabilities").click()
    expect(wide.locator(".token")).to_have_count(12)
    wide.locator(".token").first.hover()
    expect(wide.locator(CARD)).to_contain_text("Alternatives come with answers made while")
    # What comes from now on has them, and they are kept.
    wide.get_by_role("button", name="Continue").click()
    expect(wide.locator(".token")).to_have_count(24)
    expect(wide.locator(".meta")).to_contain_text("Finished")
    assert fake.bodies[1]["logprobs"] == 5
    wide.reload()
    expect(wide.locator(".token")).to_have_count(24)
    wide.locator(".token").nth(20).hover()
    expect(wide.locator(f"{CARD} li")).to_have_count(5)


@pytest.mark.parametrize("mode", ["chat", "prompt"])
def test_half_characters_share_a_place(page: Any, fake: Any, mode: str) -> None:
    page.locator(f"#mode-{mode}").click()
    page.locator("#probabilities").click()
    send(page, "halves")
    expect(page.locator(".made")).to_have_text("A 🌬 mill é.")
    assert page.locator(".token").all_text_contents() == ["A ", "🌬", " mill", " é", "."]
    page.locator(".token").nth(1).click()
    expect(page.locator(".card-head")).to_have_count(2)
    expect(page.locator(CARD)).to_contain_text("part of a character")


def test_a_token_that_is_not_among_the_likeliest(wide: Any, fake: Any) -> None:
    """In chats a server tells the likeliest alone; what was drawn is shown all the same."""
    wide.locator("#probabilities").click()
    fake.plan.unlikely = True
    send(wide, "Hello")
    wide.locator(".token").nth(2).hover()
    expect(wide.locator(f"{CARD} li")).to_have_count(5)
    expect(wide.locator(f"{CARD} li").last).to_have_class("mine")


def compare(page: Any, second: str = "tour@200") -> None:
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Model to compare with").select_option(second)


def test_two_checkpoints_side_by_side(page: Any, fake: Any) -> None:
    compare(page)
    fake.plan.hold_after = 6
    send(page, "What is a mill?", wait=False)
    # Both are on their way at once.
    expect(page.locator(".meta").nth(0)).to_contain_text("6 tokens")
    expect(page.locator(".meta").nth(1)).to_contain_text("6 tokens")
    fake.release()
    expect(page.locator("#send")).to_be_visible()
    assert sorted(body["model"] for body in fake.bodies) == ["tour", "tour@200"]
    assert fake.bodies[0]["seed"] == fake.bodies[1]["seed"]
    left, right = page.locator(".lane .made").all_inner_texts()
    assert left != right
    for lane in range(2):
        tokens = page.locator(".lane").nth(lane).locator(".token")
        marked = tokens.evaluate_all(
            "(all) => all.flatMap((one, at) => one.classList.contains('differs') ? [at] : [])"
        )
        assert marked == [3]
    expect(page.locator(".parting")).to_have_text(
        "The same for 3 tokens; the first that differs is marked."
    )
    boxes = [page.locator(".lane").nth(lane).bounding_box() for lane in range(2)]
    beside = boxes[0]["y"] == boxes[1]["y"]
    assert beside == (page.viewport_size["width"] > 900)


def test_each_lane_goes_on_with_its_own_answer(wide: Any, fake: Any) -> None:
    compare(wide)
    send(wide, "One")
    texts = wide.locator(".lane .made").all_inner_texts()
    send(wide, "Two")
    said = {body["model"]: body["messages"][1]["content"] for body in fake.bodies[2:]}
    assert said == {"tour": texts[0], "tour@200": texts[1]}
    # What is kept goes on when nothing is compared any more.
    wide.get_by_role("button", name="Keep this one").last.click()
    wide.get_by_role("button", name="Compare").click()
    send(wide, "Three")
    second = wide.locator(".pair").nth(1).locator(".made").all_inner_texts()
    assert fake.bodies[-1]["messages"][3]["content"] == second[1]
    wide.reload()
    expect(wide.locator(".pair")).to_have_count(2)
    expect(wide.locator(".differs")).to_have_count(4)


def test_the_same_model_twice_says_the_same(wide: Any, fake: Any) -> None:
    compare(wide, "tour")
    wide.locator("#mode-prompt").click()
    send(wide, "There was")
    expect(wide.locator(".parting")).to_have_text("Both are the same.")
    expect(wide.locator(".differs")).to_have_count(0)


def test_stopping_a_comparison_stops_both(wide: Any, fake: Any) -> None:
    compare(wide)
    fake.plan.hold_after = 2
    send(wide, "What is a mill?", wait=False)
    expect(wide.locator(".meta").nth(1)).to_contain_text("2 tokens")
    wide.keyboard.press("Escape")
    expect(wide.locator(".meta")).to_contain_text(["Stopped by you", "Stopped by you"])
    fake.release()
    fake.plan.hold_after = None
    wide.get_by_role("button", name="Continue").click()
    expect(wide.locator(".meta")).to_contain_text(["Finished · 12", "Finished · 12"])
