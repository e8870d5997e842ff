"""Conversations in the browser: the list, what survives, what goes out and what comes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.text.chat.conversations import LineLedger, read_conversations

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


def send(page: Any, text: str) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".meta").last).to_contain_text("Finished")


def library(page: Any) -> None:
    if not page.locator("#library").is_visible():
        page.locator("#open-library").click()


def titles(page: Any) -> Any:
    return page.locator("#conversations .title")


def exported(page: Any, button: str, folder: Path) -> list[Any]:
    library(page)
    with page.expect_download() as waiting:
        page.get_by_role("button", name=button).click()
    file = folder / waiting.value.suggested_filename
    waiting.value.save_as(file)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_list(page: Any, fake: Any) -> None:
    for text in ("About mills", "About rivers"):
        library(page)
        page.locator("#new").click()
        send(page, text)
    library(page)
    expect(titles(page)).to_have_text(["About rivers", "About mills"])
    page.get_by_label("Search conversations").fill("MILLS about")
    expect(titles(page)).to_have_text(["About mills"])
    page.get_by_label("Search conversations").fill("nowhere")
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Rename “About mills”").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    page.get_by_label("Name", exact=True).fill("Grinding")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["About rivers", "Grinding"])
    page.locator("#conversations .open", has_text="Grinding").click()
    expect(page.locator(".user .text")).to_have_text("About mills")
    page.reload()
    expect(page.locator(".user .text")).to_have_text("About mills")
    library(page)
    expect(titles(page)).to_have_text(["About rivers", "Grinding"])


def test_deleting_can_be_undone(wide: Any, fake: Any) -> None:
    send(wide, "About mills")
    answer = wide.locator(".made").inner_text()
    wide.get_by_role("button", name="Delete “About mills”").focus()
    wide.keyboard.press("Enter")
    expect(titles(wide)).to_have_count(0)
    expect(wide.locator("#new")).to_be_focused()
    wide.get_by_role("button", name="Undo").click()
    expect(titles(wide)).to_have_text(["About mills"])
    expect(wide.locator(".made")).to_have_text(answer)
    wide.get_by_role("button", name="Delete “About mills”").focus()
    wide.keyboard.press("Enter")
    wide.reload()
    expect(wide.locator("#no-conversations")).to_be_visible()


def test_what_is_deleted_while_it_is_written_stays_deleted(wide: Any, fake: Any) -> None:
    fake.plan.hold_after = 2
    wide.locator("#draft").fill("About mills")
    wide.locator("#draft").press("Enter")
    expect(wide.locator(".meta")).to_contain_text("2 tokens")
    wide.get_by_role("button", name="Delete “About mills”").focus()
    wide.keyboard.press("Enter")
    expect(wide.locator("#send")).to_be_visible()
    expect(titles(wide)).to_have_count(0)
    fake.release()
    wide.locator("#draft").fill("not sent yet")
    wide.reload()
    expect(wide.locator("#no-conversations")).to_be_visible()
    # What is written and not sent is no conversation yet, but it is not lost either.
    expect(wide.locator("#draft")).to_have_value("not sent yet")


def test_exported_conversations_are_training_data(page: Any, fake: Any, tmp_path: Path) -> None:
    send(page, "One")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".count")).to_have_text("2/2")
    expect(page.locator(".meta").last).to_contain_text("Finished")
    chosen = page.locator(".made").inner_text()
    chat = {"messages": [{"role": "user", "content": "One"}]}
    chat["messages"].append({"role": "assistant", "content": chosen})
    assert exported(page, "Export this", tmp_path) == [chat]
    page.keyboard.press("Escape")
    page.locator("#mode-prompt").click()
    send(page, "There was “once”")
    made = page.locator(".made").text_content()
    pair = {"prompt": "There was “once”", "completion": made}
    assert exported(page, "Export all", tmp_path) == [pair, chat]
    ledger = LineLedger()
    read = list(read_conversations(str(tmp_path / "*.jsonl"), ledger))
    assert len(read) == 3 and ledger.described() is None


def test_an_import_brings_all_of_it_back(visit: Any, fake: Any, tmp_path: Path) -> None:
    lines = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Good day <b>to you</b>"},
                {"role": "user", "content": "And now?"},
                {"role": "assistant", "content": "Nothing."},
            ]
        },
        {"prompt": "Once", "completion": " upon a time"},
    ]
    file = tmp_path / "in.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(text + 'nonsense\n{"messages": 5}\n')
    page = visit("narrow")
    library(page)
    page.locator("#import-file").set_input_files(file)
    notice = "Imported 2 conversations. 2 lines are left out: no conversation."
    expect(page.get_by_text(notice)).to_be_visible()
    expect(page.locator(".made")).to_have_text(["Good day <b>to you</b>", "Nothing."])
    open_settings = page.locator("#open-settings")
    open_settings.click()
    expect(page.get_by_label("System message")).to_have_value("Be brief.")
    page.keyboard.press("Escape")
    assert exported(page, "Export all", tmp_path) == lines
    # An imported answer can be continued, and a new one asked for.
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".meta").last).to_contain_text("Finished")
    assert fake.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.reload()
    library(page)
    expect(titles(page)).to_have_text(["Hello", "Once"])


def test_nothing_to_export_is_said(wide: Any, fake: Any) -> None:
    wide.get_by_role("button", name="Export all").click()
    expect(wide.get_by_text("There is nothing to export")).to_be_visible()


BREAK = """async (texts) => {
  const database = await new Promise((resolve) => {
    const request = indexedDB.open("gristmill", 1);
    request.onsuccess = () => resolve(request.result);
  });
  const change = database.transaction("conversations", "readwrite");
  for (const text of texts) change.objectStore("conversations").put(JSON.parse(text));
  await new Promise((resolve) => { change.oncomplete = resolve; });
  database.close();
  localStorage.setItem("gristmill.settings", "{broken");
  localStorage.setItem("gristmill.models", "7");
  localStorage.setItem("gristmill.probabilities", '"perhaps"');
}"""


def test_broken_storage_does_not_break_the_page(wide: Any, fake: Any) -> None:
    send(wide, "About mills")
    circle = {
        "version": 1, "id": "circle", "title": "", "system": "", "mode": "chat", "top": "a",
        "nodes": {"a": {"id": "a", "parent": None, "role": "top", "children": ["b"],
                        "chosen": "b"},
                  "b": {"id": "b", "parent": "a", "role": "user", "text": "x",
                        "children": ["b"], "chosen": "b"}},
    }  # fmt: skip
    broken = [{"id": "one"}, {"id": "two", "version": 1, "nodes": 5}, circle]
    wide.evaluate(BREAK, [json.dumps(value) for value in broken])
    wide.reload()
    expect(wide.get_by_text("3 conversations in the browser's storage could not")).to_be_visible()
    expect(titles(wide)).to_have_text(["About mills"])
    send(wide, "It still works")


FULL = """() => {
  const full = () => { throw new DOMException("full", "QuotaExceededError"); };
  IDBObjectStore.prototype.put = full;
  Storage.prototype.setItem = full;
}"""


def test_a_full_storage_is_said_and_nothing_is_lost_from_the_page(wide: Any, fake: Any) -> None:
    wide.evaluate(FULL)
    send(wide, "About mills")
    expect(wide.get_by_text("The browser's storage is full")).to_be_visible()
    send(wide, "About rivers")
    expect(wide.locator(".user .text")).to_have_text(["About mills", "About rivers"])


@pytest.mark.parametrize("what", ["indexedDB", "localStorage"])
def test_a_browser_without_storage(visit: Any, fake: Any, browser: Any, what: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    script = f"Object.defineProperty(window, '{what}', {{ get() {{ throw new Error('no'); }} }})"
    context.add_init_script(script)
    page = visit(context=context)
    send(page, "About mills")
    warned = page.get_by_text("This browser keeps nothing for this page")
    expect(warned).to_have_count(1 if what == "indexedDB" else 0)
    context.close()


def test_two_tabs_see_the_same_conversations(visit: Any, fake: Any) -> None:
    one = visit()
    other = visit(context=one.context)
    send(one, "About mills")
    expect(titles(other)).to_have_text(["About mills"])
    titles(other).click()
    expect(other.locator(".made")).to_have_text(one.locator(".made").inner_text())
    send(one, "About rivers")
    expect(other.locator(".user .text")).to_have_text(["About mills", "About rivers"])


def test_leaving_in_the_middle_keeps_the_text_so_far(wide: Any, fake: Any) -> None:
    fake.plan.hold_after = 4
    wide.locator("#draft").fill("About mills")
    wide.locator("#draft").press("Enter")
    expect(wide.locator(".meta")).to_contain_text("4 tokens")
    text = wide.locator(".made").inner_text()
    wide.reload()
    expect(wide.locator(".made")).to_have_text(text)
    expect(wide.locator(".meta")).to_contain_text("Not finished")
