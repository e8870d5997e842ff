"""The report page: what it holds, what it refuses, and that it needs nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.report import plots
from gristmill.report.page import write_report
from gristmill.report.plots import LIMIT, MOST_EVENTS, MOST_SAMPLES
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import to_json
from gristmill.track.records import EventRecord, Record, SampleRecord, StepRecord, ValidationRecord

MakeRun = Callable[..., Path]


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the content of its data element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.title = ""
        self._inside: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        if self._inside == "title":
            self.title += data


def contents(page: Path) -> dict[str, Any]:
    return dict(json.loads(Elements(page.read_text("utf-8")).data))


def moment(step: int) -> dict[str, Any]:
    return {"step": step, "samples": step, "tokens": step, "time": float(step)}


def bare_run(folder: Path, records: list[Record], *, settings: str = "") -> Path:
    run = RunFolder(folder)
    run.create()
    run.settings.write_text(settings, "utf-8")
    run.metrics.write_text("".join(to_json(record) + "\n" for record in records), "utf-8")
    return folder


def event(step: int) -> EventRecord:
    return EventRecord(**moment(step), level="info", text=f"event {step}")


def step_record(number: int, **others: Any) -> StepRecord:
    names = ("lr", "grad_norm", "tokens_per_second", "step_seconds", "tflops", "tflops_causal")
    return StepRecord(**{**moment(number), **dict.fromkeys(names, 1.0), "loss": 2.0, **others})


def test_one_run_has_its_headline_numbers_and_curves(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "gpt2", steps=2400)
    page = write_report([run], tmp_path / "pages" / "report.html")
    assert page == tmp_path / "pages" / "report.html"
    (shown,) = contents(page)["runs"]
    assert (shown["name"], shown["state"]) == ("gpt2", "done")
    summary = shown["summary"]
    assert summary["step"] == 2400
    assert summary["tokens"] == 2400 * 480 * 1024
    assert summary["parameters"] == 124439808
    checks = shown["validation"]["curves"]["loss"]["mean"]
    assert len(checks) == 12
    assert summary["best_loss"] == pytest.approx(min(checks), rel=1e-5)
    assert summary["final_loss"] == pytest.approx(checks[-1], rel=1e-5)
    assert summary["tokens_per_second"] == pytest.approx(480 * 1024 / 2.4, rel=0.03)
    assert summary["mfu"] == pytest.approx(0.48, rel=0.03)
    assert summary["planned"]["tokens_per_second"] == 215e3
    assert summary["planned"]["memory_bytes"] == 39 * 2**30
    curves = shown["train"]["curves"]
    assert "loss_scale" not in curves
    assert len(curves["loss"]["mean"]) == LIMIT
    assert shown["environment"]["device"] == "NVIDIA A100-SXM4-80GB"
    assert 'preset = "gpt2-small"' in shown["settings"]
    assert [sample["step"] for sample in shown["samples"]] == list(range(200, 2401, 200))
    assert shown["events"]["total"] == 3


def test_several_runs_are_compared_by_the_settings_that_differ(
    tmp_path: Path, make_run: MakeRun
) -> None:
    runs = [
        make_run(tmp_path / "a", steps=60),
        make_run(tmp_path / "b", steps=60, lr=3e-4, half=True),
    ]
    page = write_report(runs, tmp_path / "report.html")
    content = contents(page)
    assert {row["setting"]: row["values"] for row in content["differences"]} == {
        "name": ["a", "b"],
        "optim.lr": ["0.0006", "0.0003"],
        "precision.compute": ["bf16", "fp16"],
    }
    assert "loss_scale" in content["runs"][1]["train"]["curves"]
    assert Elements(page.read_text("utf-8")).title.startswith("a · b")


def test_exchanges_are_shown_of_runs_that_have_them(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [
        make_run(tmp_path / "a", steps=60),
        make_run(tmp_path / "b", steps=60, workers=True),
    ]
    plain, gossip = contents(write_report(runs, tmp_path / "report.html"))["runs"]
    assert {"sent_bytes", "mixing"}.isdisjoint(plain["train"]["curves"])
    assert "consensus_distance" not in plain["validation"]["curves"]
    assert plain["summary"]["sent_bytes"] is None
    assert gossip["train"]["curves"].keys() >= {"sent_bytes", "mixing", "sync_wait"}
    assert gossip["summary"]["sent_bytes"] == 60 * 497_759_232
    distances = gossip["validation"]["curves"]["consensus_distance"]["mean"]
    assert len(distances) == 12 and distances[0] != distances[-1]


def test_a_setting_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    runs = [
        bare_run(tmp_path / "a", [event(1)], settings="[x]\ny = 1\n"),
        bare_run(tmp_path / "b", [event(1)], settings="[x]\ny = 1\nz = 2024-01-01\n"),
    ]
    content = contents(write_report(runs, tmp_path / "report.html"))
    assert content["differences"] == [{"setting": "x.z", "values": [None, '"2024-01-01"']}]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [bare_run(tmp_path / side / "run", [event(1)]) for side in ("left", "right")]
    content = contents(write_report(runs, tmp_path / "report.html"))
    assert [run["name"] for run in content["runs"]] == [str(run) for run in runs]


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path, make_run: MakeRun) -> None:
    text = write_report([make_run(tmp_path / "a", steps=30)], tmp_path / "r.html").read_text(
        "utf-8"
    )
    loading = {"link", "img", "iframe", "object", "embed", "base", "audio", "video"}
    for tag, attributes in Elements(text).found:
        assert tag not in loading
        assert not {"src", "href"} & set(attributes), tag
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)|fetch\(|XMLHttpRequest|import\(", text)
    assert re.findall(r"https?://[^\s\"'<]+", text) == []


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- \udc80 \u2028 {{data}} {{title}}"
    sample = SampleRecord(**moment(1), prompt=hostile, text=hostile)
    run = bare_run(tmp_path / "<b>&{{data}}", [], settings=f"# {hostile}\n".replace("\udc80", ""))
    lines = to_json(sample).encode(errors="backslashreplace") + b"\n"
    RunFolder(run).metrics.write_bytes(lines)
    plain = write_report([bare_run(tmp_path / "plain", [event(1)])], tmp_path / "plain.html")
    page = write_report([run], tmp_path / "report.html")
    elements = Elements(page.read_text("utf-8"))
    assert elements.found == Elements(plain.read_text("utf-8")).found
    assert elements.title.startswith("<b>&{{data}}")
    (shown,) = json.loads(elements.data)["runs"]
    assert shown["samples"] == [{"step": 1, "texts": [{"prompt": hostile, "text": hostile}]}]


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    nan = float("nan")
    records = [step_record(1), step_record(2, loss=nan, grad_norm=float("inf"), nan=1)]
    (run,) = contents(write_report([bare_run(tmp_path / "a", list(records))], tmp_path / "r.html"))[
        "runs"
    ]
    assert run["train"]["curves"]["loss"]["mean"] == [2.0, None]
    assert run["train"]["curves"]["grad_norm"]["mean"] == [1.0, None]
    assert run["summary"]["train_loss"] == 2.0
    assert run["summary"]["nan"] == 1
    assert run["summary"]["best_loss"] is None
    assert run["state"] == "unknown"


def test_very_long_runs_keep_the_newest(tmp_path: Path) -> None:
    records: list[Record] = []
    for step in range(1, 1001):
        records += [event(step), SampleRecord(**moment(step), prompt="p", text=str(step))]
    (run,) = contents(write_report([bare_run(tmp_path / "a", records)], tmp_path / "r.html"))[
        "runs"
    ]
    assert len(run["samples"]) == MOST_SAMPLES
    assert run["samples"][-1]["step"] == 1000
    assert run["events"]["total"] == 1000
    assert len(run["events"]["newest"]) == MOST_EVENTS
    assert run["events"]["newest"][-1]["text"] == "event 1000"


def test_all_folders_that_cannot_be_reported_are_named_together(tmp_path: Path) -> None:
    started = bare_run(tmp_path / "started", [])
    unwritten = bare_run(tmp_path / "unwritten", [])
    RunFolder(unwritten).metrics.unlink()
    good = bare_run(tmp_path / "good", [event(1)])
    runs = [tmp_path / "nowhere", started, good, unwritten]
    with pytest.raises(UserError) as caught:
        write_report(runs, tmp_path / "report.html")
    assert caught.value.exit is Exit.DATA
    found = [(problem.where, problem.what) for problem in caught.value.problems]
    assert found == [
        (str(tmp_path / "nowhere"), "this folder holds no run"),
        (str(started), "this run has no metrics yet"),
        (str(unwritten), "this run has no metrics yet"),
    ]
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(UserError, match="no run was given"):
        write_report([], tmp_path / "report.html")


def test_settings_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    runs = [bare_run(tmp_path / name, [event(1)], settings="a = = 1") for name in ("a", "b")]
    with pytest.raises(UserError, match="not valid TOML"):
        write_report(runs, tmp_path / "report.html")


def test_damage_is_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = RunFolder(bare_run(tmp_path / "run", [event(1)]))
    folder.metrics.write_text(folder.metrics.read_text() + "damaged\n" + to_json(event(2)) + "\n")
    folder.environment.write_text("{damaged")
    folder.status.write_text("[]")
    told: list[str] = []
    (shown,) = contents(write_report([folder.path], folder.report, warn=told.append))["runs"]
    assert [one["text"] for one in shown["events"]["newest"]] == ["event 1", "event 2"]
    assert shown["state"] == "unknown" and shown["environment"] == {}
    assert "left out 1 damaged line, first line 2" in told[0]
    assert "environment.json: not valid JSON" in told[1]


def test_a_clock_that_was_set_back_gives_no_negative_times(tmp_path: Path) -> None:
    clocks = [100.0, 110.0, 50.0, 60.0, math.inf, 65.0]
    records: list[Record] = [step_record(n, time=one) for n, one in enumerate(clocks, start=1)]
    run = bare_run(tmp_path / "a", records)
    (shown,) = contents(write_report([run], tmp_path / "r.html"))["runs"]
    assert shown["train"]["seconds"] == [0.0, 10.0, 10.0, 20.0, 20.0, 25.0]
    assert shown["summary"]["seconds"] == 25.0


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity", "1" * 400, "true", '"x"'])
def test_numbers_that_are_none_do_not_end_the_report(tmp_path: Path, number: str) -> None:
    folder = RunFolder(bare_run(tmp_path / "run", [step_record(1)]))
    line = to_json(step_record(2))
    lines = [line.replace(f'"{name}": 1.0', f'"{name}": {number}') for name in ("lr", "mfu")]
    lines += [line.replace(f'"{name}": 2', f'"{name}": {number}') for name in ("tokens", "time")]
    folder.metrics.write_text(folder.metrics.read_text() + "".join(f"{one}\n" for one in lines))
    folder.status.write_text(f'{{"state": {number}, "reason": {number}, "step": {number}}}')
    folder.environment.write_text(
        f'{{"parameters": {number}, "a": [{number}], "planned": {{"mfu": {number}}}}}'
    )
    measure = f'{{"value": {number}, "stderr": {number}}}'
    names = ("step", "count", "name", "precision", "unit")
    for wrong in names:
        texts = {one: number if one == wrong else '"1"' for one in names}
        values = ", ".join(f'"{name}": {text}' for name, text in texts.items())
        content = f'{{{values}, "measures": {{"acc": {measure}}}}}'
        (folder.evals / f"{wrong}.json").write_text(content)
    page = write_report([folder.path], folder.report, warn=lambda text: None)
    assert "NaN" not in Elements(page.read_text("utf-8")).data.replace('"NaN"', "").replace(
        "[NaN]", ""
    )
    assert contents(page)["runs"][0]["name"] == "run"


def test_a_long_run_is_summed_up_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[Record] = []
    for step in range(1, 101):
        records.append(step_record(step, loss=float(step), tokens_per_second=float(step)))
        if step % 10 == 0:
            values = {"perplexity": 1.0, "windows": 1, "seconds": 1.0, "best": False}
            records.append(ValidationRecord(**moment(step), loss=abs(50.0 - step), **values))
    run = bare_run(tmp_path / "a", records)
    whole = contents(write_report([run], tmp_path / "whole.html"))["runs"]
    monkeypatch.setattr(plots, "_BLOCK", 8)
    monkeypatch.setattr(plots, "_MOST_VALUES", 10)
    parts = contents(write_report([run], tmp_path / "parts.html"))["runs"]
    assert whole[0]["train"] == parts[0]["train"] and len(whole[0]["train"]["step"]) == 100
    assert whole[0]["validation"] == parts[0]["validation"]
    summary = parts[0]["summary"]
    assert summary["tokens_per_second"] == pytest.approx(50, abs=8)
    assert {**summary, "tokens_per_second": 50.5} == whole[0]["summary"]
    assert summary["train_loss"] == 90.5 and summary["best_step"] == 50


def test_sources_and_sets_have_curves_of_their_own(tmp_path: Path) -> None:
    """Also where a source has no tokens in a step, and where a loss is no number."""
    records: list[Record] = []
    for step in range(1, 41):
        code = None if step % 3 == 0 else 3.0 + step / 100
        told = {
            "a.b/web": {"loss": 2.0, "tokens": 10 * step},
            "code": {"loss": code, "tokens": step},
        }
        if step == 5:
            told["code"]["loss"] = float("nan")
        records.append(step_record(step, sources=told))
        if step % 10 == 0:
            numbers = {"loss": 1.0 + step, "perplexity": 9.0, "windows": 4, "bits_per_byte": None}
            about = {"perplexity": 8.0, "windows": 1, "seconds": 1.0, "best": False}
            sets = {"code": numbers}
            records.append(ValidationRecord(**moment(step), loss=2.0, **about, sets=sets))
    run = bare_run(tmp_path / "a", records)
    (shown,) = contents(write_report([run], tmp_path / "r.html"))["runs"]
    parts = shown["parts"]
    assert list(parts) == ["source.a.b/web.", "source.code.", "validation.code."]
    assert parts["source.a.b/web."]["curves"]["tokens"]["mean"] == [10 * n for n in range(1, 41)]
    losses = parts["source.code."]["curves"]["loss"]["mean"]
    assert [losses[n - 1] for n in (1, 3, 5, 40)] == [3.01, None, None, 3.4]
    assert parts["source.code."]["step"] == shown["train"]["step"] == list(range(1, 41))
    checks = parts["validation.code."]
    assert checks["step"] == [10, 20, 30, 40] == shown["validation"]["step"]
    assert checks["curves"]["loss"]["mean"] == [11.0, 21.0, 31.0, 41.0]
    assert "bits_per_byte" not in checks["curves"]
    assert shown["validation"]["curves"]["loss"]["mean"] == [2.0] * 4


def test_parts_that_are_no_numbers_are_damage(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "a", [step_record(1, sources={"web": {"loss": 2.0}})])
    file = RunFolder(run).metrics
    line = file.read_text()
    changed = [line.replace('{"loss": 2.0}', new, 1) for new in ("3", '{"loss": "x"}', "[1]")]
    file.write_text(line + "".join(changed))
    told = list[str]()
    page = write_report([run], tmp_path / "r.html", warn=told.append)
    assert len(told) == 1 and "3 damaged lines, first line 2" in told[0]
    (shown,) = contents(page)["runs"]
    assert shown["parts"]["source.web."]["step"] == [1]


def test_rows_without_every_field_are_read(tmp_path: Path) -> None:
    """Files of older versions have fewer fields, and those that are not finite are texts."""
    run = bare_run(tmp_path / "a", [step_record(1)])
    old = {key: value for key, value in json.loads(to_json(step_record(2))).items() if key != "nan"}
    strange = to_json(step_record(3, loss=float("nan")))
    metrics = RunFolder(run).metrics
    metrics.write_text(f"{metrics.read_text()}{json.dumps(old)}\n{strange}\n")
    (shown,) = contents(write_report([run], tmp_path / "r.html"))["runs"]
    assert shown["train"]["step"] == [1, 2, 3]
    assert shown["train"]["curves"]["loss"]["mean"] == [2.0, 2.0, None]


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 37))
def test_some_of_many_values_are_spread_evenly(count: int, limit: int, at_a_time: int) -> None:
    spread = plots.EvenlySpread[int](limit)
    for begin in range(0, count, at_a_time):
        spread.add(range(begin, min(count, begin + at_a_time)))
    kept = spread.all()
    assert len(kept) <= 2 * limit + 1 and kept[-1] == count - 1
    assert len({after - before for before, after in pairwise(kept[:-1])}) <= 1
    assert kept == sorted(set(kept)) and (count > 2 * limit or kept == list(range(count)))
