"""Branches: edits and new answers stand beside the old ones, and all of them are kept."""

from __future__ import annotations

from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


def send(page: Any, text: str) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".meta").last).to_contain_text("Finished")


def answers(page: Any) -> list[str]:
    return list(page.locator(".assistant .made").all_inner_texts())


def questions(page: Any) -> list[str]:
    return list(page.locator(".user .text").all_inner_texts())


def test_regenerating_and_going_back(page: Any, fake: Any) -> None:
    send(page, "What is a mill?")
    [first] = answers(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".count")).to_have_text("2/2")
    expect(page.locator(".meta").last).to_contain_text("Finished")
    [second] = answers(page)
    assert first != second
    back = page.get_by_role("button", name="Previous of 2 answers")
    on = page.get_by_role("button", name="Next of 2 answers")
    expect(on).to_be_disabled()
    back.click()
    expect(page.locator(".count")).to_have_text("1/2")
    # There is no way further back, so the focus is on the way forward.
    expect(on).to_be_focused()
    assert answers(page) == [first]
    page.keyboard.press("Enter")
    expect(page.locator(".count")).to_have_text("2/2")
    assert answers(page) == [second]


def test_editing_a_message_keeps_what_followed_the_old_one(page: Any, fake: Any) -> None:
    send(page, "One")
    send(page, "Two")
    old = answers(page)
    page.get_by_role("button", name="Edit", exact=True).first.click()
    editor = page.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    editor.fill("Another one")
    editor.press("Enter")
    expect(page.locator(".meta")).to_contain_text(["Finished"])
    assert questions(page) == ["Another one"]
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "Another one"}]
    page.get_by_role("button", name="Previous of 2 messages").click()
    assert questions(page) == ["One", "Two"] and answers(page) == old
    page.reload()
    expect(page.locator(".count")).to_have_text("1/2")
    assert questions(page) == ["One", "Two"] and answers(page) == old


def test_escape_leaves_a_message_as_it_is(page: Any, fake: Any) -> None:
    send(page, "One")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.keyboard.type("more")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit", exact=True)).to_be_focused()
    assert questions(page) == ["One"] and len(fake.bodies) == 1


def test_what_is_edited_outlives_the_end_of_an_answer(wide: Any, fake: Any) -> None:
    send(wide, "One")
    fake.plan.hold_after = 2
    wide.locator("#draft").fill("Two")
    wide.locator("#draft").press("Enter")
    expect(wide.locator(".meta").last).to_contain_text("2 tokens")
    # One answer at a time.
    expect(wide.get_by_role("button", name="Regenerate")).to_be_disabled()
    wide.get_by_role("button", name="Edit", exact=True).first.click()
    editor = wide.get_by_label("Edit the message")
    editor.fill("Something else")
    editor.press("Enter")
    expect(editor).to_have_value("Something else")
    fake.release()
    expect(wide.locator("#send")).to_be_visible()
    expect(editor).to_be_focused()
    expect(editor).to_have_value("Something else")
    editor.press("Enter")
    expect(wide.locator(".count")).to_have_text("2/2")
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "Something else"}]


def test_editing_a_prompt(page: Any, fake: Any) -> None:
    page.locator("#mode-prompt").click()
    send(page, "There was")
    page.get_by_role("button", name="Edit the prompt").click()
    page.get_by_label("Edit the prompt").fill("There is")
    page.get_by_role("button", name="Send", exact=True).first.click()
    expect(page.locator(".given")).to_have_text("There is")
    expect(page.locator(".meta")).to_contain_text("Finished")
    assert fake.bodies[-1]["prompt"] == "There is"
    page.get_by_role("button", name="Previous of 2 prompts").click()
    expect(page.locator(".given")).to_have_text("There was")


def test_branches_within_branches_survive_a_reload(wide: Any, fake: Any) -> None:
    send(wide, "One")
    wide.get_by_role("button", name="Regenerate").click()
    expect(wide.locator(".meta")).to_contain_text("Finished")
    send(wide, "Two")
    wide.get_by_role("button", name="Regenerate").last.click()
    expect(wide.locator(".count")).to_have_text(["2/2", "2/2"])
    expect(wide.locator(".meta").last).to_contain_text("Finished")
    shown = answers(wide)
    wide.reload()
    expect(wide.locator(".count")).to_have_text(["2/2", "2/2"])
    assert answers(wide) == shown
    wide.get_by_role("button", name="Previous of 2 answers").first.click()
    assert questions(wide) == ["One"]
    wide.get_by_role("button", name="Next of 2 answers").click()
    assert answers(wide) == shown
