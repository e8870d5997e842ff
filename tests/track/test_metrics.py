"""The records and their file: exact round trips, newer files, cut and damaged lines."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.track import metrics
from gristmill.track.metrics import cut_metrics, from_json, read_metrics, to_json, validation_loss
from gristmill.track.records import (
    BREAKDOWNS,
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    SystemRecord,
    ValidationRecord,
)

counts = st.integers(min_value=0, max_value=2**62)
floats = st.floats()
maybe_floats = st.none() | floats
maybe_parts = st.none() | st.dictionaries(
    st.text(), st.dictionaries(st.text(), maybe_floats | counts, max_size=3), max_size=3
)
moments = {"step": counts, "samples": counts, "tokens": counts, "time": floats}
records = st.one_of(
    st.builds(
        StepRecord,
        **moments,
        **dict.fromkeys(
            ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "tflops"), floats
        ),
        tflops_causal=floats,
        mfu=maybe_floats,
        mfu_causal=maybe_floats,
        memory_bytes=st.none() | counts,
        loss_scale=maybe_floats,
        skipped=counts,
        nan=counts,
        data_wait=floats,
        sources=maybe_parts,
    ),
    st.builds(
        ValidationRecord,
        **moments,
        loss=floats,
        perplexity=floats,
        windows=counts,
        seconds=floats,
        best=st.booleans(),
        sets=maybe_parts,
    ),
    st.builds(SampleRecord, **moments, prompt=st.text(), text=st.text()),
    st.builds(
        EventRecord, **moments, level=st.sampled_from(["info", "warning", "error"]), text=st.text()
    ),
    st.builds(
        SystemRecord,
        **moments,
        host=st.text(),
        **dict.fromkeys(("cpu_use", "disk_read", "disk_write", "net_sent"), maybe_floats),
        **dict.fromkeys(("ram_bytes", "disk_free", "gpu_memory_bytes"), st.none() | counts),
        gpus=counts,
        gpu_watts=maybe_floats,
        gpu_throttled=st.none() | st.text(),
    ),
    st.builds(
        StragglerRecord,
        **moments,
        rank=counts,
        host=st.text(),
        phase=st.text(),
        ratio=floats,
        seconds=floats,
        cause=st.none() | st.text(),
        over=st.booleans(),
    ),
)


def event(step: int, text: str = "x") -> EventRecord:
    return EventRecord(step=step, samples=step, tokens=step, time=1.0, level="info", text=text)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return type(left) is type(right) and bool(left == right)


@given(records)
def test_round_trip_is_exact(record: Record) -> None:
    text = to_json(record)
    back = from_json(text)
    assert "\n" not in text
    assert type(back) is type(record)
    for field in fields(record):
        assert same(getattr(record, field.name), getattr(back, field.name)), field.name


@given(records)
def test_lines_are_strict_json_with_the_declared_order(record: Record) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    value = json.loads(to_json(record), parse_constant=refuse)
    names = [field.name for field in fields(record)]
    held = [name for name in names if name not in BREAKDOWNS or getattr(record, name) is not None]
    assert list(value) == ["kind", *held]
    assert value["kind"] == record.kind


def test_a_text_that_reads_like_a_number_stays_a_text() -> None:
    assert from_json(to_json(event(1, "nan"))) == event(1, "nan")


def test_keys_and_kinds_of_newer_versions_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    newer = json.dumps({**json.loads(to_json(event(1))), "colour": "blue"})
    path.write_text(newer + "\n" + '{"kind": "poem", "step": 1}\n' + to_json(event(2)) + "\n")
    assert read_metrics(path) == [event(1), event(2)]
    assert from_json('{"kind": "poem", "step": 1}') is None


def test_fields_with_a_default_may_be_missing() -> None:
    value = dict.fromkeys(("time", "loss", "lr", "grad_norm", "tokens_per_second"), 1.0)
    value |= {"step_seconds": 1.0, "tflops": 1.0, "tflops_causal": 1.0}
    record = from_json(json.dumps({"kind": "step", "step": 1, "samples": 2, "tokens": 3, **value}))
    assert isinstance(record, StepRecord)
    assert record.mfu is None
    assert record.skipped == 0


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        '{"step": 1}',
        '{"kind": 5, "step": 1}',
        '{"kind": "event", "step": 1, "samples": 1, "tokens": 1, "time": 1.0, "text": "x"}',
        to_json(event(1)).replace('"x"', "5"),
        to_json(event(1)).replace('"time": 1.0', '"time": "soon"'),
    ],
)
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        from_json(line)


def test_a_line_cut_anywhere_is_skipped_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = (to_json(event(1)) + "\n").encode()
    last = to_json(event(2, "žluť")).encode()
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        assert read_metrics(path) == [event(1)]
        cut_metrics(path, after=10)
        assert path.read_bytes() == whole


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json(event(1)))
    cut_metrics(path, after=1)
    assert path.read_text() == to_json(event(1)) + "\n"


@given(steps=st.lists(st.integers(0, 20)), after=st.integers(0, 20))
def test_cutting_keeps_exactly_the_records_up_to_a_step(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], after: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_text("".join(to_json(event(step)) + "\n" for step in steps))
    cut_metrics(path, after=after)
    assert [record.step for record in read_metrics(path)] == [s for s in steps if s <= after]


def test_cutting_keeps_what_a_newer_version_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "poem", "step": 1, "verse":  2}\n{"kind": "poem", "step": 9}\n')
    cut_metrics(path, after=5)
    assert path.read_text() == '{"kind": "poem", "step": 1, "verse":  2}\n'


def test_cutting_a_missing_file_does_nothing(tmp_path: Path) -> None:
    cut_metrics(tmp_path / "metrics.jsonl", after=5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["no json\n", '{"kind": "step", "step": 1}\n'])
def test_damage_before_the_end_is_named_by_its_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json(event(1)) + "\n" + damage + to_json(event(2)) + "\n")
    with pytest.raises(UserError, match="line 2 cannot be read") as caught:
        read_metrics(path)
    assert caught.value.exit is Exit.DATA
    damaged: dict[int, str] = {}
    assert read_metrics(path, damaged=damaged.__setitem__) == [event(1), event(2)]
    assert list(damaged) == [2]


def test_no_flipped_bit_keeps_a_file_from_being_cut(tmp_path: Path) -> None:
    """Of the lines, only the damaged one may be lost; if it cannot be read, it is returned."""
    path = tmp_path / "metrics.jsonl"
    lines = [(to_json(event(step)) + "\n").encode() for step in (1, 2, 3)]
    for bit in range(8 * len(lines[1])):
        flipped = bytearray(lines[1])
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(lines[0] + flipped + lines[2])
        damaged = cut_metrics(path, after=2)
        left = path.read_bytes()
        assert left.startswith(lines[0]), f"bit {bit}"
        if flipped.endswith(b"\n"):
            assert left in (lines[0], lines[0] + flipped) and lines[2] not in left
            assert b"".join(damaged) in (b"", flipped)


def write_long(path: Path, steps: int) -> None:
    """Records with the disorder that events of another thread cause."""
    records = [event(step + 3 if step % 50 == 0 else step, "x" * 90) for step in range(steps)]
    path.write_text("".join(to_json(record) + "\n" for record in records))


@pytest.mark.parametrize("after", [0, 49, 50, 51, 2499, 2998, 5000])
def test_cutting_a_long_file_gives_what_filtering_it_would(tmp_path: Path, after: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_long(path, 3000)
    wanted = [record for record in read_metrics(path) if record.step <= after]
    assert cut_metrics(path, after=after) == []
    assert read_metrics(path) == wanted


def test_only_the_end_of_a_long_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage at its beginning is neither found nor changed."""
    path, parse, parsed = tmp_path / "metrics.jsonl", metrics._parse, list[str]()

    def counting(line: str) -> dict[str, Any]:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(metrics, "_parse", counting)
    write_long(path, 6000)
    beginning = b"damaged\n" * 10_000
    path.write_bytes(beginning + path.read_bytes())
    assert cut_metrics(path, after=5990) == []
    assert validation_loss(path, step=5990) is None
    assert 9 < len(parsed) < 3000
    assert path.read_bytes().startswith(beginning)
    assert from_json(path.read_text().splitlines()[-1]) == event(5990, "x" * 90)


def test_a_line_longer_than_a_block_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [event(1), event(2, "x" * 300_000), event(3)]
    path.write_text("".join(to_json(record) + "\n" for record in records))
    cut_metrics(path, after=2)
    assert read_metrics(path) == records[:2]


def test_the_validation_loss_of_a_step_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert validation_loss(path, step=1) is None
    write_long(path, 2000)
    record = ValidationRecord(
        step=7, samples=1, tokens=1, time=1.0, loss=math.inf, perplexity=1.0, windows=1,
        seconds=1.0, best=True,
    )  # fmt: skip
    with path.open("a") as file:
        for step, loss in ((1500, 3.5), (2000, math.nan)):
            file.write(to_json(replace(record, step=step, loss=loss)) + "\n")
        file.write("damaged\n" + to_json(event(2000)) + "\n")
    assert validation_loss(path, step=1500) == 3.5
    assert math.isnan(validation_loss(path, step=2000) or 0.0)
    assert validation_loss(path, step=1999) is None
