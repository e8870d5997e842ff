"""Keyboard, screen reader, colours, phone: the page for everyone."""

from __future__ import annotations

import re
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


def send(page: Any, text: str) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".meta").last).to_contain_text("Finished")


def focused(page: Any) -> str:
    """The focused control in words."""
    return str(
        page.evaluate(
            "(() => { const e = document.activeElement; return e.ariaLabel || e.id"
            " || e.textContent.trim(); })()"
        )
    )


def test_everything_by_keyboard_alone(wide: Any, fake: Any) -> None:
    expect(wide.locator("#draft")).to_be_focused()
    wide.keyboard.type("What is")
    wide.keyboard.press("Shift+Enter")
    wide.keyboard.type("a mill?")
    wide.keyboard.press("Enter")
    expect(wide.locator(".meta")).to_contain_text("Finished")
    assert fake.bodies[0]["messages"][0]["content"] == "What is\na mill?"
    expect(wide.locator("#draft")).to_be_focused()
    fake.plan.hold_after = 2
    wide.keyboard.type("More")
    wide.keyboard.press("Enter")
    expect(wide.locator(".meta").last).to_contain_text("2 tokens")
    wide.keyboard.press("Escape")
    expect(wide.locator(".meta").last).to_contain_text("Stopped by you")
    wide.keyboard.press("Control+k")
    expect(wide.locator("#search")).to_be_focused()
    wide.keyboard.type("mill")
    wide.keyboard.press("ArrowDown")
    expect(wide.locator("#conversations .open")).to_be_focused()
    wide.keyboard.press("Enter")
    expect(wide.locator("#draft")).to_be_focused()
    wide.keyboard.press("Control+Shift+o")
    expect(wide.locator("#welcome")).to_be_visible()
    expect(wide.locator("#draft")).to_be_focused()
    wide.keyboard.press("Control+/")
    expect(wide.get_by_role("dialog", name="Help")).to_be_visible()
    wide.keyboard.press("Escape")
    expect(wide.get_by_role("dialog")).to_have_count(0)
    expect(wide.locator("#draft")).to_be_focused()


def test_the_order_of_the_tab_key(wide: Any, fake: Any) -> None:
    send(wide, "Hello")
    wide.locator(".skip").focus()
    order = [focused(wide)]
    for _ in range(60):
        wide.keyboard.press("Tab")
        if wide.evaluate("document.activeElement === document.body"):
            break
        order.append(focused(wide))
    landmarks = [
        "Skip to the text field", "Conversations", "mode-chat", "model", "compare", "Settings",
        "new", "search", "Rename “Hello”", "Delete “Hello”", "export-one", "Edit", "Regenerate",
        "draft", "probabilities", "send", "Close the settings", "system", "temperature",
        "stop-texts", "reset",
    ]  # fmt: skip
    assert [name for name in order if name in landmarks] == landmarks


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_all_controls_have_names(visit: Any, fake: Any, size: str) -> None:
    page = visit(size)
    page.locator("#probabilities").click()
    page.get_by_role("button", name="Compare").click()
    send(page, "Hello")
    page.locator("#open-help").click()
    nameless = []
    for part in ("library", "settings", None):
        if part and not page.locator(f"#{part}").is_visible():
            page.keyboard.press("Escape")
            page.locator(f"#open-{part}").click()
        tree = page.locator("body").aria_snapshot()
        roles = "button|textbox|combobox|searchbox|spinbutton|radio|checkbox|link|option|dialog"
        nameless += re.findall(rf"^\s*- (?:{roles})(?: \[[^\]]*\])*:?$", tree, re.MULTILINE)
        if part and size == "narrow":
            page.keyboard.press("Escape")
    assert nameless == []


def test_landmarks_and_headings(wide: Any, fake: Any) -> None:
    send(wide, "Hello")
    for role, name in (
        ("banner", None), ("navigation", "Conversations"), ("main", None),
        ("complementary", "Settings"), ("form", "Write"), ("heading", "Gristmill"),
        ("heading", "You"), ("heading", "tour"), ("article", "tour"), ("group", "Mode"),
    ):  # fmt: skip
        expect(wide.get_by_role(role, name=name, exact=True)).to_have_count(1)
    said = wide.get_by_role("status")
    expect(said.last).to_have_attribute("aria-live", "polite")
    # A growing answer must not be read out bit by bit.
    assert wide.locator("#reading [aria-live], #reading[aria-live], [role=log]").count() == 0


def test_drawers_hold_the_focus_and_give_it_back(visit: Any, fake: Any) -> None:
    page = visit("narrow")
    for part, name in (("library", "Conversations"), ("settings", "Settings")):
        drawer = page.locator(f"#{part}")
        expect(drawer).to_be_hidden()
        button = page.get_by_role("button", name=name, exact=True)
        expect(button).to_have_attribute("aria-expanded", "false")
        button.click()
        expect(drawer).to_be_visible()
        expect(drawer.locator(".close")).to_be_focused()
        for _ in range(25):
            page.keyboard.press("Tab")
            inside = "document.activeElement === document.body || " + (
                f"document.activeElement.closest('#{part}') !== null"
            )
            assert page.evaluate(inside)
        page.keyboard.press("Escape")
        expect(drawer).to_be_hidden()
        expect(button).to_be_focused()
        button.click()
        page.touchscreen.tap(5 if part == "settings" else 370, 400)
        expect(drawer).to_be_hidden()


@pytest.mark.parametrize("width", [360, 375, 900, 1280])
def test_nothing_sticks_out(visit: Any, fake: Any, width: int) -> None:
    page = visit()
    page.set_viewport_size({"width": width, "height": 740})
    page.locator("#compare").click()
    fake.plan.script = ["a" * 300, " b"]
    send(page, "w" * 200)
    page.locator("#mode-prompt").click()
    send(page, "w" * 200)
    for locator in ("body", "#reading", "main", ".top"):
        wide = "(place) => place.scrollWidth - place.clientWidth"
        assert page.locator(locator).evaluate(wide) <= 0, locator
    for control in page.locator(".top button:visible, .composer-foot button:visible").all():
        box = control.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_what_a_finger_needs(visit: Any, fake: Any) -> None:
    page = visit("narrow", is_mobile=True)
    for control in page.locator(".top button:visible, #composer button:visible").all():
        assert control.bounding_box()["height"] >= 34
    size = "(field) => parseFloat(getComputedStyle(field).fontSize)"
    assert page.locator("#draft").evaluate(size) >= 16


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility({ opacityProperty: true }) || element.disabled) continue;
    if (element.closest(":disabled, .unseen, option")) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) {
      behind.unshift(getComputedStyle(at).backgroundColor);
    }
    const back = light(rgb(behind));
    const ink = light(rgb([...behind, getComputedStyle(element).color]));
    const ratio = (Math.max(back, ink) + 0.05) / (Math.min(back, ink) + 0.05);
    if (ratio < 4.5) low.push(`${element.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(visit: Any, fake: Any, scheme: str) -> None:
    page = visit(color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) > 128) == (scheme == "light")
    page.locator("#probabilities").click()
    page.locator("#compare").click()
    fake.plan.refuse = [(400, "no", {})]
    send_failing(page)
    fake.plan.length = 60
    send(page, "Hello")
    levels = page.locator(".token").evaluate_all("(all) => all.map((one) => one.dataset.level)")
    assert set(levels) == set("01234")
    page.locator(".token").nth(3).hover()
    assert page.evaluate(CONTRAST) == []


def send_failing(page: Any) -> None:
    page.context.pages[0].locator("#draft").fill("Fails")
    page.locator("#draft").press("Enter")
    expect(page.locator("#send")).to_be_visible()


@pytest.fixture(autouse=True)
def _expected(watched: Any) -> None:
    watched.expected = ("the server responded with a status of 400",)


def test_the_switch_of_colours_stays(page: Any, fake: Any) -> None:
    button = page.locator("#theme")
    expect(button).to_have_attribute("aria-label", "Colours: as the system")
    button.click()
    button.click()
    expect(button).to_have_attribute("aria-label", "Colours: dark")
    page.reload()
    expect(button).to_have_attribute("aria-label", "Colours: dark")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_little_moves_for_those_who_want_no_motion(visit: Any, fake: Any) -> None:
    for motion, moves in (("reduce", False), ("no-preference", True)):
        page = visit(reduced_motion=motion)
        duration = page.evaluate(
            "parseFloat(getComputedStyle(document.querySelector('#send')).transitionDuration)"
        )
        assert (duration > 0) == moves
