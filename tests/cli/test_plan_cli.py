"""`gristmill plan`: what is printed, written and refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gristmill.base.errors import UserError
from gristmill.cli.main import app
from gristmill.config.load import load_run

TEXT = """# a plan
name = "planned"
preset = "gpt3-1.7b"

[data]
paths = "tokens/web"

[train]
until = "20B tokens"
batch = 256        # samples

[precision]
compute = "bf16"
"""


@pytest.fixture(autouse=True)
def _no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(TEXT)
    return file


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def planned(*words: object) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*words: object) -> Any:
    return json.loads(planned(*words, "--json"))


def test_the_table(run: Path) -> None:
    text = planned(run, "--gpus", 16, "--gpu", "h100-80gb", "--top", 3)
    head, machine, note, _, columns, first, *rest = text.splitlines()
    assert head.startswith("planned: 1.64B parameters, 256 samples of 2048 tokens a step (524k)")
    assert machine.startswith("16 x h100-80gb, 79.6 GiB each, 2 nodes: nvlink4 inside, ndr400")
    assert "50,257 assumed: the token files are not there yet" in note
    expected = "layout micro recompute memory step tokens/s MFU time GPU-hours money kWh"
    assert columns.split() == expected.split()
    assert first.split()[0] == "1"
    assert "layouts fit" in text
    assert "As the run file says, dp_replicate 16, micro-batch 8" in text
    assert any("pp 16: 16 does not divide the layers 24" in line for line in rest)


def test_json_has_every_figure(run: Path) -> None:
    found = as_json(run, "--gpus", 16, "--gpu", "a100-80gb", "--price", 2, "--top", 5)
    assert [one["rank"] for one in found["layouts"]] == [1, 2, 3, 4, 5]
    assert found["tokens"] == pytest.approx(20e9, rel=1e-3)
    for one in found["layouts"]:
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"])
        memory = one["memory"]
        total = memory.pop("total")
        assert sum(memory.values()) == total
        largest = max(size for _, size in one["timeline"])
        assert total - memory["fragmentation"] == pytest.approx(largest, abs=16)
        assert one["dollars"] == pytest.approx(2 * one["device_hours"])
        assert one["device_hours"] == pytest.approx(16 * 24 * one["days"])
        assert one["kwh"] == pytest.approx(0.4 * one["device_hours"])
        sizes = [one[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
        assert sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4] == 16


def test_one_layout_in_full(run: Path) -> None:
    text = planned(run, "--gpus", 8, "--gpu", "a100-40gb", "--what", 2)
    for word in ("weights", "optimizer", "over a step", "matrix products", "to the horizon"):
        assert word in text
    assert "layout 2:" in text
    with pytest.raises(UserError, match="layouts that fit"):
        raise invoke(run, "--gpus", 8, "--gpu", "a100-40gb", "--what", 10000).exception or OSError


def test_time_and_money(run: Path) -> None:
    words = (run, "--gpus", 16, "--gpu", "h100-80gb")
    text = planned(*words, "--hours", "1", "--budget", 1e6)
    assert "in 1h00m00s: not enough, the first layout reaches" in text
    assert "devices would be needed" in text
    assert "for $1,000,000: enough" in text
    refused = invoke(*words[:3], "--gpu", "gb200", "--budget", 5).exception
    assert isinstance(refused, UserError)
    assert "--price" in str(refused.problems[0].remedy)


def test_writing_puts_the_layout_into_the_file(run: Path) -> None:
    layout = as_json(run, "--gpus", 16, "--gpu", "a100-40gb")["layouts"][2]
    text = planned(run, "--gpus", 16, "--gpu", "a100-40gb", "--what", 3, "--write")
    assert "written to" in text
    written = run.read_text()
    assert written.startswith(TEXT.split("batch = 256")[0])
    assert "batch = 256        # samples" in written
    config = load_run(run)
    assert config.train.micro_batch == layout["micro_batch"]
    assert config.train.recompute == layout["recompute"]
    sizes = {name: layout[name] for name in ("pp", "dp_shard", "cp", "tp")}
    assert {name: getattr(config.parallel, name) for name in sizes} == sizes
    own = planned(run, "--gpus", 16, "--gpu", "a100-40gb")
    assert f"micro-batch {layout['micro_batch']}, recompute {layout['recompute']}: " in own
    # The next layout takes its place, whatever axes the first one had.
    for number in (1, 40, 80):
        planned(run, "--gpus", 16, "--gpu", "a100-40gb", "--what", number, "--write")
        tomllib.loads(run.read_text())


def test_what_fits_nowhere_is_said(run: Path) -> None:
    result = invoke(run, "preset=gpt3-18.4b", "--gpus", 2, "--gpu", "l4")
    assert isinstance(result.exception, UserError)
    assert "no layout of this run fits on 2 x l4" in str(result.exception)
    assert "does not fit even with full recomputation" in result.stdout
    assert "most of it optimizer" in result.stdout
    assert as_json(run, "preset=gpt3-18.4b", "--gpus", 2, "--gpu", "l4")["layouts"] == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "give a run file"),
        (("RUN", "--gpu", "h1000"), "no kind of device is called 'h1000'"),
        (("RUN", "--gpu", "l4", "--link", "fast"), "no link is called 'fast'"),
        (("RUN", "--gpu", "l4", "--gpus", "2", "--hours", "soon"), "'soon' is not a time"),
        (("RUN", "--gpu", "tpu-v4", "optim.preconditioner.type=soap"), "soap does not run on XLA"),
    ],
)
def test_mistakes_are_refused(run: Path, words: tuple[str, ...], what: str) -> None:
    result = invoke(*(run if word == "RUN" else word for word in words))
    assert isinstance(result.exception, UserError)
    assert what in str(result.exception)


@pytest.mark.parametrize("link", ["ndr400", "10"])
def test_a_slower_network_is_slower(run: Path, link: str) -> None:
    words = (run, "--gpus", 16, "--gpu", "h100-80gb", "--per-node", 4)
    fast = as_json(*words, "--link", "xdr800")["layouts"][0]["seconds"]
    assert as_json(*words, "--link", link)["layouts"][0]["seconds"] > fast


def test_token_files_say_how_large_the_vocabulary_is(run: Path, tmp_path: Path) -> None:
    from gristmill.bench.measure import write_random_tokens

    tokens = write_random_tokens(tmp_path / "random", vocabulary=3000)
    found = as_json(run, f"data.paths={tokens}", "--gpus", 2, "--gpu", "h100-80gb")
    assert found["notes"] == []
    words = (run, "model.vocab=3000", "--gpus", 2, "--gpu", "h100-80gb")
    assert found["layouts"] == as_json(*words)["layouts"]


def test_a_model_of_hugging_face_is_planned_from_its_config(run: Path) -> None:
    values = (
        '{model_type="llama",hidden_size=2048,num_hidden_layers=16,num_attention_heads=32,'
        "num_key_value_heads=8,intermediate_size=8192,vocab_size=128256,"
        "max_position_embeddings=4096}"
    )
    run.write_text(
        TEXT.replace('preset = "gpt3-1.7b"\n', "") + f"\n[model]\nhf_config = {values}\n"
    )
    found = as_json(run, "--gpus", 8, "--gpu", "h100-80gb")
    assert found["notes"] == []
    assert all(one["tp"] == one["pp"] == 1 for one in found["layouts"])
    assert any("Hugging Face models do not have" in one["why"] for one in found["refused"])


def test_measuring_this_machine(run: Path, tmp_path: Path) -> None:
    text = planned("--calibrate")
    assert "product_share" in text
    assert (tmp_path / "cache/gristmill/calibration.json").is_file()
    if "as cpu" in text:
        assert "speeds are those measured on processor" in planned(
            run, "preset=gpt2-nano", "--gpu", "cpu"
        )
