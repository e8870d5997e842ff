"""Curves as bytes: updates make what a whole answer gives, and parts end at single records."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.track.metrics import cut_metrics, to_json
from gristmill.track.records import EvaluationRecord, SystemRecord, ValidationRecord
from gristmill.watch.curves import CurveQuery, Held, answer
from gristmill.watch.folders import FoundRun
from gristmill.watch.run import WatchedRun


def watched(made: Any) -> WatchedRun:
    path = made.folder.path
    return WatchedRun(FoundRun("0123456789ab", path, path.name))


def read_all(run: WatchedRun) -> None:
    run.look()
    while run.read():
        pass
    run.update_row()


class Page:
    """Keeps curves as the page does: by what it was sent, and by what it says it has."""

    def __init__(self, names: list[str], decode: Callable[..., Any], **query: Any) -> None:
        self.names, self._decode, self._query = names, decode, query
        self.curves: dict[str, dict[str, Any]] = {}
        self.sent = 0

    def update(self, run: WatchedRun, *, whole: bool = False) -> None:
        held = {
            (run.id, name): Held(one["generation"], len(one["x"]), one["revision"])
            for name, one in self.curves.items()
        }
        query = CurveQuery(self.names, held={} if whole else held, **self._query)
        header, curves = self._decode(answer([run], query))
        self.sent = len(curves)
        if whole:
            self.curves = {}
        for curve in curves:
            arrays = {"x": curve.x, "mean": curve.mean, "low": curve.low, "high": curve.high}
            if curve.first:
                before = self.curves[curve.name]
                assert before["generation"] == curve.generation
                arrays = {
                    key: None
                    if array is None
                    else np.concatenate([before[key][: curve.first], array])
                    for key, array in arrays.items()
                }
            self.curves[curve.name] = {**arrays, "generation": curve.generation}
            if not len(curve.x):
                del self.curves[curve.name]
        for one in self.curves.values():
            one["revision"] = header["revisions"][0]


def assert_same(one: Page, other: Page) -> None:
    assert one.curves.keys() == other.curves.keys()
    for name, curve in one.curves.items():
        for key, array in curve.items():
            if key != "revision":
                np.testing.assert_array_equal(array, other.curves[name][key], f"{name} {key}")


def validation_line(step: int, loss: float) -> str:
    facts = {"samples": 8 * step, "tokens": 64 * step, "time": 1000.0 + 2 * step}
    measured = {"perplexity": np.exp(loss).item(), "windows": 8, "seconds": 1.0, "best": False}
    return to_json(ValidationRecord(step=step, **facts, loss=loss, **measured)) + "\n"


@pytest.mark.parametrize("axis", ["step", "tokens", "seconds"])
def test_updates_make_what_a_whole_answer_gives(
    made: Callable[..., Any], decode: Callable[..., Any], axis: str
) -> None:
    folder = made()
    run, names = watched(folder), ["loss", "grad_norm", "validation.loss", "loss_scale"]
    page, fresh = (Page(names, decode, points=20, axis=axis) for _ in range(2))
    rng, step = np.random.default_rng(1), 0
    for turn in range(60):
        count = int(rng.integers(0, 9))
        for _ in range(count):
            step += 1
            loss = float("nan") if step % 11 == 0 else 5.0 - 0.01 * step
            scale = float(step) if step > 100 else None
            folder.steps(step, step, loss=loss, loss_scale=scale)
            if step % 4 == 0:
                folder.append(validation_line(step, 3.0))
        if turn == 40:  # the run goes back, and takes other steps from there
            cut_metrics(folder.folder.metrics, after=step // 2)
            step //= 2
            folder.steps(step + 1, step + 5, loss=9.0, time=5000.0)
            step += 5
        read_all(run)
        page.update(run)
        fresh.update(run, whole=True)
        assert_same(page, fresh)
        page.update(run)
        assert page.sent == 0, "what has not changed is not sent again"
    assert set(page.curves) == set(names)
    assert max(len(one["x"]) for one in page.curves.values()) <= 20


def test_an_update_sends_the_last_point_and_new_ones(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    folder = made(steps=1000)
    run = watched(folder)
    read_all(run)
    _, (curve,) = decode(answer([run], CurveQuery(["loss"], points=100)))
    assert len(curve.x) == 63  # buckets of 16
    assert curve.x[0] == 16 and curve.x[-1] == 1000 and curve.low is not None
    assert curve.low[0] == np.float32(2 + 1 / 16) and curve.high[0] == np.float32(3.0)
    folder.steps(1001, 1010)
    read_all(run)
    held = {(run.id, "loss"): Held(curve.generation, 63)}
    _, (news,) = decode(answer([run], CurveQuery(["loss"], points=100, held=held)))
    assert (news.first, news.generation) == (62, curve.generation)
    assert news.x.tolist() == [1008, 1010]


def test_few_records_are_exact_and_have_no_band(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    run = watched(made(steps=30))
    read_all(run)
    _, curves = decode(answer([run], CurveQuery(["loss", "nothing", "lr"])))
    assert [curve.name for curve in curves] == ["loss", "lr"]
    assert curves[0].low is None
    expected = np.array([2 + 1 / step for step in range(1, 31)], dtype=np.float32)
    np.testing.assert_array_equal(curves[0].mean, expected)
    assert curves[0].x.tolist() == list(range(1, 31))


def test_zooming_in_ends_at_single_records(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    run = watched(made(steps=20_000))
    read_all(run)
    whole = CurveQuery(["loss"], points=200)
    _, (curve,) = decode(answer([run], whole))
    assert curve.low is not None
    for axis, low, high, factor in (
        ("step", 12_000, 12_100, 1),
        ("tokens", 64 * 12_000, 64 * 12_100, 64),
        ("seconds", 2 * 11_999, 2 * 12_099, 2),
    ):
        query = CurveQuery(["loss", "lr"], points=200, axis=axis, low=low, high=high)
        _, (part, _) = decode(answer([run], query))
        assert part.low is None
        begin = 11_999 if axis != "seconds" else 11_998
        steps = np.arange(begin, begin + 103)
        np.testing.assert_array_equal(part.x, factor * steps)
        real = steps + 1 if axis == "seconds" else steps
        np.testing.assert_array_equal(part.mean, (2 + 1 / real).astype(np.float32))
        held = {(run.id, name): Held(part.generation, len(part.x)) for name in ("loss",)}
        again = CurveQuery(["loss"], points=200, axis=axis, low=low, high=high, held=held)
        assert decode(answer([run], again))[1] == []


def test_a_wide_part_is_thinned_and_covers_its_range(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    run = watched(made(steps=20_000))
    read_all(run)
    _, (part,) = decode(answer([run], CurveQuery(["loss"], points=100, low=1000, high=15_000)))
    assert 50 <= len(part.x) <= 102 and part.low is not None
    assert part.x[0] <= 1300 and part.x[-1] >= 15_000
    _, nothing = decode(answer([run], CurveQuery(["loss"], low=1e6, high=2e6)))
    assert nothing == []


def test_a_part_of_a_file_that_was_written_again_is_not_mixed_up(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    folder = made(steps=20_000)
    run = watched(folder)
    read_all(run)
    cut_metrics(folder.folder.metrics, after=9000)
    folder.steps(9001, 21_000, loss=7.0)
    query = CurveQuery(["loss"], points=200, low=12_000, high=12_050)
    _, (part,) = decode(answer([run], query))  # not yet read again: what is known is shown
    assert (part.mean < 3).all()
    read_all(run)
    _, (part,) = decode(answer([run], query))
    assert (part.mean == 7.0).all() and part.low is None


def test_scores_come_with_their_errors_and_hosts_with_their_names(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    folder = made(steps=3)
    stamp = {"samples": 8, "tokens": 64, "time": 1000.0}
    for step, error in ((1, 0.25), (2, None)):
        score = {"name": "hella.swag", "metric": "acc", "value": 0.5, "items": 9, "seconds": 1.0}
        folder.append(to_json(EvaluationRecord(step=step, **stamp, **score, stderr=error)) + "\n")
        for host in ("a.b", "c"):
            record = SystemRecord(step=step, **stamp, host=host, cpu_use=0.5, gpu_throttled=None)
            folder.append(to_json(record) + "\n")
    run = watched(folder)
    read_all(run)
    names = ["evaluation.hella.swag.acc", "system.a.b.cpu_use", "system.c.cpu_use"]
    assert set(names) <= set(run.row["names"])
    assert not any("stderr" in name for name in run.row["names"])
    _, curves = decode(answer([run], CurveQuery(names)))
    assert [curve.name for curve in curves] == names
    score = curves[0]
    assert score.low.tolist() == [0.25, 0.5] and score.high.tolist() == [0.75, 0.5]
    assert score.mean.tolist() == [0.5, 0.5]


def test_sources_have_curves_of_the_same_steps(
    made: Callable[..., Any], decode: Callable[..., Any], line_of: Callable[..., str]
) -> None:
    folder = made(steps=0)
    for step in range(1, 31):
        part = {"loss": None if step == 7 else 0.5 * step, "tokens": 64 * step}
        folder.append(line_of(step, sources={"data/web": part}))
    run = watched(folder)
    read_all(run)
    names = ["source.data/web.loss", "source.data/web.tokens", "loss"]
    assert set(names) <= set(run.row["names"])
    _, curves = decode(answer([run], CurveQuery(names)))
    assert [curve.name for curve in curves] == names
    loss, tokens, whole = curves
    assert loss.x.tolist() == tokens.x.tolist() == whole.x.tolist() == list(range(1, 31))
    assert np.isnan(loss.mean[6]) and loss.mean[29] == 15.0 and tokens.mean[0] == 64.0


def test_flops_need_their_number_for_each_token(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    folder = made(steps=5)
    run = watched(folder)
    read_all(run)
    query = CurveQuery(["loss"], axis="flops")
    assert decode(answer([run], query))[1] == []
    folder.folder.environment.write_text('{"parameters": 100}')
    run.update_row()
    _, (curve,) = decode(answer([run], query))
    np.testing.assert_array_equal(curve.x, [600.0 * 64 * step for step in range(1, 6)])
    folder.folder.environment.write_text('{"parameters": 100, "flops_per_token": 1000.0}')
    os.utime(folder.folder.environment, (1, 1))
    run.update_row()
    part = CurveQuery(["loss"], axis="flops", low=2.5 * 64_000, high=3.5 * 64_000)
    _, (curve,) = decode(answer([run], part))
    np.testing.assert_array_equal(curve.x, [64_000.0 * step for step in (2, 3, 4)])


def test_a_long_file_is_shown_before_it_was_read(
    made: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    folder = made(steps=20_000)
    folder.append(validation_line(20_000, 2.5))
    run = watched(folder)
    run.look()
    run.sample()
    run.update_row()
    assert run.row["read"] == 0.0 and run.row["step"] == 20_000
    assert run.row["validation"] == 2.5
    _, (early,) = decode(answer([run], CurveQuery(["loss"])))
    assert len(early.x) > 100 and early.x[-1] == 20_000 and early.x[0] < 200
    read_all(run)
    held = {(run.id, "loss"): Held(early.generation, len(early.x), 10**9)}
    _, (curve,) = decode(answer([run], CurveQuery(["loss"], held=held)))
    assert curve.first == 0 and run.row["read"] == 1.0


def test_memory_of_a_run_is_bounded(made: Callable[..., Any]) -> None:
    folder = made(steps=40_000)
    run = watched(folder)
    read_all(run)
    size = sum(curves.nbytes for curves in run.digest.groups.values()) + run.index.nbytes
    assert size < 0.6 * 2**20


@pytest.mark.parametrize("points", [2, 3, 600])
def test_empty_runs_have_no_curves(
    made: Callable[..., Any], decode: Callable[..., Any], points: int, tmp_path: Path
) -> None:
    run = watched(made())
    read_all(run)
    header, curves = decode(answer([run], CurveQuery(["loss"], points=points)))
    assert curves == [] and header["runs"] == [run.id]
    assert decode(answer([], CurveQuery(["loss"])))[1] == []
