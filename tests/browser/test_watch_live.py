"""The live page while runs go on: what grows, begins and ends, and a connection that breaks."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect

CONTROL = pytest.mark.parametrize("watching_options", [{"control": True}], indirect=True)


KEY = "a-long-enough-key-of-this-server"


@pytest.fixture
def watching_options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    options = dict(getattr(request, "param", {}))
    if "key_file" in options:
        options["key_file"] = tmp_path / "keys"
        options["key_file"].write_text(f"{KEY}\n")
        options["key_file"].chmod(0o600)
    return options


@pytest.fixture
def run(tmp_path: Path, run_folders: Any) -> Any:
    run = run_folders.GrowingRun(tmp_path / "runs" / "grows", until=400, seed=2)
    run.grow(100, every=50)
    return run


def until(page: Any, true: str) -> None:
    """Wait for an expression; the page's own policy forbids that it polls by itself."""
    end = time.monotonic() + 20
    while not page.evaluate(true):
        assert time.monotonic() < end, f"this did not come true: {true}"
        page.wait_for_timeout(30)


def last_step(page: Any, step: int) -> None:
    until(page, f"document.querySelector('.plot')?.chart.series[0]?.x.at(-1) === {step}")


def test_curves_and_rows_grow_with_the_run(run: Any, watching: Any, visit: Any) -> None:
    page = visit()
    last_step(page, 100)
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer) if "curves" in answer.url else None)
    for _ in range(3):
        run.grow(7, every=50)
    last_step(page, 121)
    expect(page.locator("#rows li")).to_contain_text("121 / 400")
    whole = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    losses = [one["loss"] for one in whole if one["kind"] == "step"]
    page.locator("#smooth").fill("0")
    until(page, "document.querySelector('.plot').chart.series[0].raw === null")
    shown = page.evaluate("[...document.querySelector('.plot').chart.series[0].y]")
    assert shown == pytest.approx(losses, rel=1e-6)
    # Only the end of a curve comes again.
    assert answers and all(len(answer.body()) < 8000 for answer in answers)


def test_what_a_run_took_back_is_gone_from_the_chart(run: Any, watching: Any, visit: Any) -> None:
    page = visit()
    last_step(page, 100)
    lines = run.folder.metrics.read_text().splitlines(keepends=True)
    run.folder.metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= 60))
    last_step(page, 60)
    run.step = 60
    run.grow(20, every=50)
    last_step(page, 80)
    expect(page.locator("#rows li")).to_contain_text("80 / 400")


def test_runs_that_begin_and_are_removed(
    run: Any, run_folders: Any, tmp_path: Path, watching: Any, visit: Any
) -> None:
    page = visit(path="/#sort=name")
    last_step(page, 100)
    other = run_folders.GrowingRun(tmp_path / "runs" / "another", until=400)
    other.grow(40)
    expect(page.locator("#rows .name")).to_have_text(["another", "grows"], timeout=20_000)
    until(page, "document.querySelector('.plot').chart.series.length >= 2")
    shutil.rmtree(tmp_path / "runs" / "another")
    expect(page.locator("#rows .name")).to_have_text(["grows"], timeout=20_000)
    until(
        page,
        "document.querySelector('.plot').chart.series.every(({ label }) =>"
        " !label.includes('another'))",
    )


def test_samples_and_the_log_appear_as_they_are_written(
    run: Any, watching: Any, visit: Any
) -> None:
    page = visit()
    page.locator("#rows .open").click()
    page.get_by_role("button", name="Samples", exact=True).click()
    expect(page.locator(".run-body output")).to_have_text("step 100, the newest")
    run.grow(50, every=50)
    expect(page.locator(".run-body output")).to_have_text("step 150, the newest")
    page.get_by_role("button", name="Log", exact=True).click()
    expect(page.locator(".logged")).to_contain_text("started grows")
    run.log("the hundred and fifty-first")
    run.grow(1)
    expect(page.locator(".logged")).to_contain_text("the hundred and fifty-first")
    run.step = run.until
    run.state("done")
    run.grow(0)
    run.state("done")
    expect(page.locator(".run-head .pill")).to_have_text("done")


def test_a_lost_connection_is_told_and_mended(
    run: Any, watching: Any, visit: Any, watched: Any
) -> None:
    watched.expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE",
                        "ERR_CONNECTION_RESET")  # fmt: skip
    page = visit()
    last_step(page, 100)
    watching.stop()
    expect(page.locator("#live")).to_have_attribute("data-state", "lost", timeout=20_000)
    expect(page.get_by_role("alert")).to_contain_text(
        re.compile(r"connection to the server is lost\. What is shown is from \d\d:\d\d:\d\d")
    )
    # What was there stays.
    last_step(page, 100)
    run.grow(30)
    watching.start()
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#live")).to_have_attribute("data-state", "live", timeout=30_000)
    expect(page.get_by_role("alert")).to_have_count(0)
    last_step(page, 130)


def test_without_runs_the_page_says_what_to_do(
    watching: Any, visit: Any, run_folders: Any, tmp_path: Path
) -> None:
    page = visit()
    expect(page.get_by_role("heading", name="No runs found")).to_be_visible()
    expect(page.locator("#welcome")).to_contain_text("gristmill train")
    expect(page.locator("#welcome li")).to_have_text([str(tmp_path / "runs")])
    run = run_folders.GrowingRun(tmp_path / "runs" / "first")
    expect(page.get_by_role("heading", name="Nothing recorded yet")).to_be_visible(timeout=20_000)
    run.grow(20)
    last_step(page, 20)
    expect(page.locator("#welcome")).to_be_hidden()


def test_texts_of_a_run_never_become_markup(
    tmp_path: Path, run_folders: Any, watching: Any, visit: Any
) -> None:
    hostile = "<img src=x onerror=document.title='broken'>"
    run = run_folders.GrowingRun(tmp_path / "runs" / hostile, until=400)
    run.grow(60, every=30)
    run.write(run.event(f"{hostile} went back", "warning"))
    run.log(hostile)
    run.state("failed", reason=hostile)
    with run.folder.metrics.open("a") as file:
        file.write("damaged\n")
    run.write(run.event("after it"))
    page = visit()
    expect(page.locator("#rows .name")).to_have_text([hostile])
    page.locator("#rows .open").click()
    for part in ("Overview", "Samples", "Events", "Log", "Settings"):
        page.get_by_role("button", name=part, exact=True).click()
        expect(page.locator(".run-body > *").first).to_be_visible()
    page.get_by_role("button", name="Overview", exact=True).click()
    expect(page.locator(".run-body")).to_contain_text("1 damaged line of metrics.jsonl left out")
    page.get_by_role("tab", name="Compare").click()
    expect(page.get_by_role("region", name="Results")).to_contain_text(hostile)
    assert page.locator("img").count() == 0
    assert "broken" not in page.title() or hostile in page.title()


# ------------------------------------------------------------------ actions


def test_without_control_the_page_only_looks(run: Any, watching: Any, visit: Any) -> None:
    page = visit()
    page.locator("#rows .open").click()
    expect(page.locator(".run-head")).to_contain_text("grows")
    expect(page.get_by_role("group", name="Actions")).to_have_count(0)
    expect(page.locator("#run")).not_to_contain_text("token")


@CONTROL
def test_without_the_token_the_page_says_where_it_is(run: Any, watching: Any, visit: Any) -> None:
    page = visit()
    page.locator("#rows .open").click()
    expect(page.locator("#run")).to_contain_text("Actions need a token")


@CONTROL
def test_actions_are_confirmed_and_written(run: Any, watching: Any, visit: Any) -> None:
    page = visit(path=f"/#token={watching.token}&sort=name")
    page.locator("#rows .open").click()
    # A link that is passed on does not hold the token.
    assert watching.token not in page.url and "sort=name" in page.url
    folder = run.folder.path / "requests"
    dialog = page.get_by_role("dialog")

    def asked() -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]

    page.get_by_role("button", name="Stop …").click()
    expect(dialog).to_contain_text("saves a checkpoint")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert asked() == []
    for button, action in (("Save now", "save"), ("Validate now", "validate"), ("Stop …", "stop")):
        page.get_by_role("button", name=button).click()
        dialog.get_by_role("button", name=button.removesuffix(" …")).click()
        expect(dialog).to_be_hidden()
        expect(page.get_by_role("status").filter(has_text="was asked")).to_be_visible()
        assert action in {one["action"] for one in asked()}
    page.get_by_role("button", name="Change the horizon …").click()
    field = dialog.get_by_label("Train until")
    expect(field).to_have_value("400 steps")
    field.fill("20 parsecs")
    with page.expect_response(re.compile("/action$")):
        dialog.get_by_role("button", name="Change the horizon").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    field.fill("20k steps")
    dialog.get_by_role("button", name="Change the horizon").click()
    expect(dialog).to_be_hidden()
    [last] = [one for one in asked() if one["action"] == "until"]
    assert last["until"].replace("_", "").startswith(("20k", "20000"))


@pytest.fixture(autouse=True)
def _expected(watched: Any) -> None:
    watched.expected = ("the server responded with a status of 400",)


@pytest.mark.parametrize("watching_options", [{"key_file": True}], indirect=True)
def test_a_server_with_keys_asks_for_one(run: Any, watching: Any, visit: Any, watched: Any) -> None:
    watched.expected = ("the server responded with a status of 401",)
    page = visit(ready=False)
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_label("Key").fill("a-wrong-key")
    with page.expect_response(re.compile("/api/runs$")):
        dialog.get_by_role("button", name="Use it").click()
    expect(dialog.get_by_label("Key")).to_have_value("")
    dialog.get_by_label("Key").fill(KEY)
    dialog.get_by_role("button", name="Use it").click()
    expect(page.locator("#live")).to_have_attribute("data-state", "live")
    last_step(page, 100)
