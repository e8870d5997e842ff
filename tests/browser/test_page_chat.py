"""Chat and prompt: sending, streaming, stopping, continuing, and what is said about an answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


def send(page: Any, text: str, *, wait: bool = True) -> None:
    """Write and send; by default, wait for the end of the answer."""
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")
    if wait:
        expect(page.locator("#send")).to_be_visible()


def answer(page: Any, index: int = -1) -> Any:
    return page.locator(".assistant .made").nth(index)


def meta(page: Any) -> Any:
    return page.locator(".meta").last


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).last.click()


def open_settings(page: Any) -> None:
    if not page.locator("#settings").is_visible():
        page.locator("#open-settings").click()


def set_value(page: Any, label: str, value: str) -> None:
    open_settings(page)
    page.get_by_label(label, exact=True).fill(value)


def test_an_answer_streams_and_says_how_it_ended(page: Any, fake: Any) -> None:
    fake.plan.hold_after = 3
    send(page, "What is a mill?", wait=False)
    expect(answer(page)).to_have_text(re.compile(r"^\w+ \w+ \w+$"))
    expect(meta(page)).to_contain_text("Writing · 3 tokens")
    expect(page.locator("#stop")).to_be_visible()
    begun = answer(page).inner_text()
    fake.release()
    expect(meta(page)).to_contain_text("Finished · 12 tokens")
    expect(meta(page)).to_contain_text("tokens/s")
    assert answer(page).inner_text().startswith(begun)
    expect(page.locator("#context")).to_have_text("16 of 1,024 tokens")
    # For screen readers: once, and when it is over.
    expect(page.locator("#said")).to_contain_text(answer(page).inner_text())
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "What is a mill?"}]


def test_the_next_message_carries_the_conversation(wide: Any, fake: Any) -> None:
    wide.get_by_label("System message").fill("Be brief.")
    send(wide, "One")
    first = answer(wide).inner_text()
    send(wide, "Two")
    assert fake.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two"},
    ]


def test_settings_reach_the_server_and_stay(page: Any, fake: Any) -> None:
    values = {
        "Temperature": "0.25", "Max tokens": "5", "Top-k": "7", "Top-p": "0.5", "Min-p": "0.125",
        "Repetition penalty": "1.5", "Presence penalty": "-0.5",
    }  # fmt: skip
    for label, value in values.items():
        set_value(page, label, value)
    page.get_by_label("Always the same").check()
    page.get_by_label("Fixed seed").fill("99")
    page.get_by_label("Stop strings").fill("END\n\\n\\nUser:")
    page.keyboard.press("Escape")
    page.reload()
    send(page, "What is a mill?")
    expect(meta(page)).to_contain_text("Stopped at the limit of 5 tokens")
    expect(meta(page)).to_contain_text("seed 99")
    body = fake.bodies[0]
    wanted = {
        "temperature": 0.25, "max_tokens": 5, "top_k": 7, "top_p": 0.5, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": -0.5, "seed": 99,
        "stop": ["END", "\n\nUser:"],
    }  # fmt: skip
    assert {name: body[name] for name in wanted} == wanted


def test_an_impossible_setting_is_shown_and_nothing_is_sent(page: Any, fake: Any) -> None:
    set_value(page, "Top-p", "7")
    page.keyboard.press("Escape")
    send(page, "Hello")
    expect(page.get_by_label("Top-p", exact=True)).to_be_focused()
    assert fake.bodies == []
    press(page, "Back to the defaults")
    expect(page.get_by_label("Top-p", exact=True)).to_have_value("1")


def test_a_new_seed_each_time_and_the_same_again(wide: Any, fake: Any) -> None:
    send(wide, "What is a mill?")
    first = answer(wide).inner_text()
    press(wide, "Regenerate")
    expect(wide.locator(".count")).to_have_text("2/2")
    assert fake.bodies[0]["seed"] != fake.bodies[1]["seed"]
    wide.get_by_role("button", name="Previous of 2 answers").click()
    press(wide, f"seed {fake.bodies[0]['seed']}")
    expect(wide.get_by_label("Always the same")).to_be_checked()
    press(wide, "Regenerate")
    expect(wide.locator(".count")).to_have_text("3/3")
    expect(answer(wide)).to_have_text(first)


def test_stop_and_continue(page: Any, fake: Any) -> None:
    open_settings(page)
    page.get_by_label("Always the same").check()
    page.keyboard.press("Escape")
    fake.plan.hold_after = 4
    send(page, "What is a mill?", wait=False)
    expect(meta(page)).to_contain_text("4 tokens")
    page.locator("#stop").click()
    expect(meta(page)).to_contain_text("Stopped by you")
    expect(page.locator("#draft")).to_be_focused()
    begun = answer(page).inner_text()
    fake.release()
    fake.plan.hold_after = None
    press(page, "Continue")
    expect(meta(page)).to_contain_text("Finished · 12 tokens")
    whole = answer(page).inner_text()
    assert whole.startswith(begun) and len(whole.split()) == 12
    body = fake.bodies[1]
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": begun}
    # It is the answer that would have come without stopping.
    press(page, "Regenerate")
    expect(answer(page)).to_have_text(whole)
    assert fake.abandoned == 1


def test_prompt_continues_a_text(page: Any, fake: Any) -> None:
    page.locator("#mode-prompt").click()
    page.locator("#draft").fill("There was once")
    press(page, "Generate")
    expect(meta(page)).to_contain_text("Finished")
    made = answer(page).text_content()
    assert fake.bodies[0]["prompt"] == "There was once"
    expect(page.locator(".assistant .text")).to_have_text(f"There was once{made}")
    # Sending nothing goes on; sending something adds it.
    page.locator("#draft").press("Enter")
    expect(meta(page)).to_contain_text("24 tokens")
    text = page.locator(".assistant .text").text_content()
    assert fake.bodies[1]["prompt"] == f"There was once{made}" and text.startswith(
        f"There was once{made}"
    )
    send(page, " And then")
    assert fake.bodies[2]["prompt"] == f"{text} And then"


def test_a_model_without_a_template_takes_prompts_alone(page: Any, fake: Any) -> None:
    page.locator("#model").select_option("base")
    expect(page.get_by_text("base has no chat template")).to_be_visible()
    expect(page.locator("#send")).to_be_disabled()
    press(page, "Use Prompt")
    send(page, "Once")
    expect(meta(page)).to_contain_text("Finished")
    assert fake.bodies[0]["model"] == "base"
    expect(page.locator("#context")).to_contain_text("of 256 tokens")


@pytest.mark.parametrize("mode", ["chat", "prompt"])
def test_output_never_becomes_markup(page: Any, fake: Any, mode: str) -> None:
    page.locator(f"#mode-{mode}").click()
    for switched in range(2):
        if switched:
            page.locator("#probabilities").click()
        send(page, f"markup <b>bold</b> {switched}")
        expect(answer(page)).to_have_text(fake.markup)
    assert page.locator("#reading img, #reading script, #reading b").count() == 0
    # The list shows what was written, too, and the page keeps its name.
    assert page.locator("#conversations b").count() == 0
    assert page.title() == "Gristmill"


def test_the_page_does_not_scroll_while_one_reads_above(page: Any, fake: Any) -> None:
    fake.plan.script = ["word\n"] * 200
    send(page, "A long one")
    reading = page.locator("#reading")
    gap = "(place) => place.scrollHeight - place.scrollTop - place.clientHeight"
    assert reading.evaluate(gap) < 2
    fake.plan.hold_after = 100
    send(page, "Another long one", wait=False)
    expect(meta(page)).to_contain_text("100 tokens")
    assert reading.evaluate(gap) < 2
    reading.evaluate("(place) => { place.scrollTop = 300; }")
    expect(page.locator("#newest")).to_be_visible()
    fake.release()
    expect(page.locator("#send")).to_be_visible()
    assert reading.evaluate("(place) => place.scrollTop") == 300
    page.locator("#newest").click()
    assert reading.evaluate(gap) < 2
    expect(page.locator("#newest")).to_be_hidden()


def test_a_copy_of_an_answer(wide: Any, fake: Any) -> None:
    wide.context.grant_permissions(["clipboard-read", "clipboard-write"])
    send(wide, "What is a mill?")
    text = answer(wide).inner_text()
    press(wide, "Copy")
    expect(wide.get_by_role("button", name="Copied")).to_be_visible()
    assert wide.evaluate("navigator.clipboard.readText()") == text


def test_another_conversation_can_be_read_while_one_is_written(wide: Any, fake: Any) -> None:
    send(wide, "First")
    fake.plan.hold_after = 2
    wide.locator("#new").click()
    send(wide, "Second", wait=False)
    expect(meta(wide)).to_contain_text("2 tokens")
    wide.get_by_role("button", name="First").first.click()
    expect(wide.locator(".user .text")).to_have_text("First")
    expect(wide.locator("#send")).to_be_visible()
    fake.release()
    wide.locator("#conversations .open", has_text="Second").click()
    expect(meta(wide)).to_contain_text("Finished · 12 tokens")
