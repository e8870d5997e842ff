"""The benchmark of optimizers: the search, what follows from its runs, the page, and a whole sweep
of a tiny model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.dom import minidom

import loss_results as losses
import optimizer_page as page
import optimizer_results as results
import optimizer_rows as rows
import optimizer_search as search
import optimizers as script
import pytest

from gristmill.bench.measure import write_random_tokens

# ------------------------------------------------------------------ the search


KNOBS = (search.Knob("lr", 0.01, 2.0), search.Knob("beta2", 0.95, 2.0, memory=True))


def walk(loss_at: Any, *, trials: int) -> list[tuple[float, ...]]:
    known: dict[str, float] = {}
    found = []
    while (one := search.next_candidate(KNOBS, known, trials=trials)) is not None:
        found.append(tuple(one.values.values()))
        known[str(one)] = loss_at(*found[-1])
    return found


def test_the_rate_goes_on_in_the_better_direction_then_the_other_setting() -> None:
    def loss(lr: float, beta2: float) -> float:
        return abs(math.log2(lr / 0.04)) + abs(math.log2((1 - beta2) / 0.1))

    found = walk(loss, trials=8)
    assert found[:4] == [(0.01, 0.95), (0.02, 0.95), (0.04, 0.95), (0.08, 0.95)]
    assert found[4:7] == [(0.04, 0.975), (0.04, 0.9), (0.04, 0.8)]
    assert found[7] == (0.0566, 0.9)  # half a step from the best so far
    down = walk(lambda lr, beta2: abs(lr - 0.0025), trials=5)
    assert [lr for lr, _ in down] == [0.01, 0.02, 0.005, 0.0025, 0.00125]


@pytest.mark.parametrize("trials", [1, 2, 6, 15])
def test_every_search_makes_as_many_trials_and_none_twice(trials: int) -> None:
    for best in (0.0001, 0.009, 0.011, 7.0):
        found = walk(lambda lr, beta2, best=best: (math.log(lr / best)) ** 2 + beta2, trials=trials)
        assert len(found) == len(set(found)) == trials


def test_rates_go_down_while_runs_diverge() -> None:
    found = walk(lambda lr, beta2: math.inf if lr > 0.002 else lr, trials=6)
    assert [lr for lr, _ in found] == [0.01, 0.02, 0.005, 0.0025, 0.00125, 0.000625]


def test_the_best_is_one_of_the_search_and_none_if_all_diverge() -> None:
    known = {"lr=0.01,beta2=0.95": 3.0, "lr=0.02,beta2=0.95": 2.0, "lr=9,beta2=0.95": 1.0}
    assert str(search.best_candidate(KNOBS, known, trials=2)) == "lr=0.02,beta2=0.95"
    lost = dict.fromkeys(known, math.inf)
    assert search.best_candidate(KNOBS, lost, trials=2) is None


# ------------------------------------------------------------------ rows and sweeps


def test_all_rows_are_settings_that_can_be_loaded() -> None:
    from gristmill.config.load import load_text

    for size, numbers in rows.SIZES.items():
        known = rows.read_rows(rows.ROWS, size=size)
        assert rows.REFERENCE in known
        muon = {name: row for name, row in known.items() if row.optim["type"] == "muon"}
        assert len({row.knobs[0].start for row in muon.values()}) == 1
        for row in known.values():
            start = search.candidate_at(row.knobs, (0.0, 0.0))
            words = [*numbers.set, *row.words(start)]
            text = f'name = "x"\npreset = "{numbers.preset}"\n[data]\npaths = "none"\n'
            text += '[train]\nuntil = "1M tokens"\nbatch = 4\n'
            optim = load_text(text, words, place=row.name).optim
            assert optim.type == row.optim["type"]
            assert optim.lr == row.knobs[0].start
            wanted = row.optim.get("preconditioner", {}).get("type")
            assert getattr(optim.preconditioning, "type", None) == wanted
            if row.optim["type"] == "muon":
                assert optim.embedding_lr == 0.3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[x]\ntitle = "X"\n', "'lr'"),
        ('[x]\ntitel = "X"\n', "'titel'"),
        ("[x\n", "rows.toml"),
        (
            '[x]\ntitle="X"\nlr=1\noptim={type="sgd"}\n'
            'second={setting="momentum",start=0.9,factor=1}',
            r"\[x\]: momentum cannot start at 0.9 and move by factors of 1",
        ),
        (
            '[x]\ntitle="X"\nlr=1\nbase="y"\noptim={type="sgd"}\n'
            'second={setting="momentum",start=0.9,factor=2}',
            "which is no row",
        ),
    ],
)
def test_a_bad_file_of_rows_is_refused_in_one_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "rows.toml"
    file.write_text(text)
    with pytest.raises(SystemExit, match=said):
        rows.read_rows(file, size="cpu")


def a_sweep(**changes: Any) -> Any:
    known = rows.read_rows(rows.ROWS, size="cpu")
    settings = {
        "size": "cpu",
        "trials": 2,
        "trial_tokens": 1000,
        "tokens": 4000,
        "seeds": (1, 2, 3),
        "points": 4,
        "common": {"batch": 4, "text": ["a", "b"]},
        "rows": tuple(known[name] for name in ("adamw", "muon", "soap-muon")),
    }
    return rows.Sweep(**(settings | changes))


def test_a_sweep_goes_on_with_the_same_settings_and_more_rows_only() -> None:
    known = rows.read_rows(rows.ROWS, size="cpu")
    before = rows.from_table(json.loads(json.dumps(rows.to_table(a_sweep()))))
    assert before == a_sweep()
    more = a_sweep(rows=(known["soap"], known["muon"]))
    names = [row.name for row in rows.joined(before, more).rows]
    assert names == ["adamw", "muon", "soap-muon", "soap"]
    with pytest.raises(SystemExit, match="has tokens 4000, not 8000"):
        rows.joined(before, a_sweep(tokens=8000))
    other = rows.replace(known["muon"], knobs=known["soap"].knobs)
    with pytest.raises(SystemExit, match="other settings for muon"):
        rows.joined(before, a_sweep(rows=(other,)))


# ------------------------------------------------------------------ results and the page

FACTS = {
    "device": "a device",
    "software": "torch",
    "code": "gristmill",
    "model": "a model",
    "training": "many tokens",
    "validation": "1,000 tokens",
    "windows": "10",
}


def a_run(name: str, final: float | None, *, seed: int = 1, step_seconds: float = 0.1) -> Any:
    """A run of 100 steps whose loss falls in a line from 6 to its end."""
    curve = (
        ()
        if final is None
        else tuple(
            losses.Point(step, 40 * step, step * step_seconds, 6 - (6 - final) * step / 100)
            for step in (25, 50, 75, 100)
        )
    )
    return losses.Result(
        name=name,
        group=name.partition("/")[0],
        seed=seed,
        asked=1000 if name.startswith("trial") else 4000,
        about="",
        settings={},
        facts=FACTS,
        date="2026-01-01",
        loss=final,
        steps=100,
        tokens=4000,
        seconds=100 * step_seconds,
        curve=curve,
        error=None if final is not None else "training: the run has diverged since step 3",
    )


def swept() -> Any:
    """AdamW is worse than Muon; SOAP-Muon needs fewer steps and more seconds."""
    runs = [
        a_run("trial/adamw@lr=0.003,beta2=0.95", 5.0),
        a_run("trial/adamw@lr=0.006,beta2=0.95", None),
        a_run("trial/muon@lr=0.02,momentum=0.95", 4.5),
        a_run("trial/muon@lr=0.04,momentum=0.95", 4.4),
        a_run("trial/soap-muon@lr=0.02,decay=0.95", 4.3),
        a_run("trial/soap-muon@lr=0.04,decay=0.95", 4.6),
        a_run("final/adamw@lr=0.003,beta2=0.95", 4.5),
        a_run("final/muon@lr=0.02,momentum=0.95", 1.0),  # not the best settings: of no account
        a_run("final/soap-muon@lr=0.02,decay=0.95", 3.5, step_seconds=0.2),
    ]
    finals = (3.9, 4.0, 4.1)
    runs += [
        a_run("final/muon@lr=0.04,momentum=0.95", loss, seed=seed)
        for seed, loss in enumerate(finals, start=1)
    ]
    return results.Sweeping(a_sweep(), runs)


def test_rows_are_compared_at_the_final_loss_of_the_reference() -> None:
    sweeping = swept()
    adamw, muon, soap = results.result_table(sweeping)
    assert (adamw["settings"], adamw["loss"]) == ("lr 0.003, beta2 0.95", "4.5000")
    assert (adamw["difference"], adamw["steps to Muon's loss"]) == ("+0.5000", "-")
    assert (muon["loss"], muon["seeds"]) == ("4.0000 ± 0.1000", "3")
    assert (muon["steps to Muon's loss"], muon["seconds to it"]) == ("100 (1.00)", "10.0 (1.00)")
    # From 6 to 3.5 in 100 steps is at 4 after 80.
    assert (soap["steps to Muon's loss"], soap["seconds to it"]) == ("80 (0.80)", "16.0 (1.60)")
    assert soap["preconditioner"] == "50 %"
    said = results.verdict(sweeping)
    assert said[0] == "Muon ends at 4.0000 after 100 steps and 10.0 seconds."
    assert said[1].startswith("SOAP-Muon has that loss after 0.80 of Muon's steps and 1.60 of")
    assert said[2].endswith("that Muon has after 0.75 of the steps and 0.75 of the seconds.")


def test_the_best_two_and_the_reference_get_all_seeds() -> None:
    sweeping = swept()
    assert sweeping.with_all_seeds() == ["muon", "soap-muon"]
    better = a_run("final/adamw@lr=0.003,beta2=0.95", 3.6)
    sweeping.runs = [run for run in sweeping.runs if run.key != better.key] + [better]
    assert sweeping.with_all_seeds() == ["adamw", "muon", "soap-muon"]


def write(sweeping: Any, file: Path) -> Path:
    more = {"sweep": rows.to_table(sweeping.sweep)}
    losses.write_results(file, sweeping.runs, more=more)
    return file


def test_the_page_is_made_from_the_file_and_keeps_its_answer(tmp_path: Path) -> None:
    file = write(swept(), tmp_path / "result.json")
    made = page.write_pages([results.read_sweep(file)], tmp_path)
    text = made.read_text()
    assert page.UNWRITTEN in text
    assert "| SOAP-Muon | lr 0.02, decay 0.95 | 1 | 3.5000 |" in text
    assert text.count("<tr><td>") == 6 and "<td>diverged</td>" in text
    assert "| device | a device |" in text and "--trials 2" in text
    for axis in ("steps", "seconds"):
        drawn = minidom.parse(str(tmp_path / f"second-order-cpu-{axis}.svg"))
        assert len(drawn.getElementsByTagName("polyline")) == 3
    made.write_text(text.replace(page.UNWRITTEN, "It **does**, mostly."))
    page.write_pages([results.read_sweep(file)], tmp_path)
    assert made.read_text() == text.replace(page.UNWRITTEN, "It **does**, mostly.")
    made.write_text(text.replace(page.END, ""))
    with pytest.raises(SystemExit, match="has lost the marks"):
        page.write_pages([results.read_sweep(file)], tmp_path)


def test_runs_without_times_are_compared_in_steps_only(tmp_path: Path) -> None:
    sweeping = swept()
    sweeping.runs = [losses.without_times(run) for run in sweeping.runs]
    file = write(sweeping, tmp_path / "result.json")
    text = page.write_pages([results.read_sweep(file)], tmp_path).read_text()
    assert "80 (0.80) | - |" in text and "seconds.svg" not in text
    assert "Muon ends at 4.0000 after 100 steps." in text


def test_first_steps_count_as_the_mean_where_steps_differ() -> None:
    steps = [losses.Step(10, 9.0)] * 10 + [losses.Step(10, 1.0), losses.Step(10, 3.0)] * 5
    steps += [losses.Step(10, 1.0)] * 10
    assert losses.clock(steps)[9] == pytest.approx(10)
    assert losses.clock(steps, first_steps="mean")[9] == pytest.approx(15)


# ------------------------------------------------------------------ a whole sweep

FAKE = """
[muon]
title  = "Muon"
lr     = 0.02
second = { setting = "momentum", start = 0.95, factor = 2, memory = true }
optim  = { type = "muon" }
[fake]
title  = "Muon, plain"
base   = "muon"
lr     = { cpu = 0.02 }
second = { setting = "weight_decay", start = 0.05, factor = 4 }
optim  = { type = "muon", normalise = "none" }
[wrong]
title  = "Wrong"
lr     = 0.02
second = { setting = "weight_decay", start = 0.05, factor = 4 }
optim  = { type = "muon", no_such_setting = 1 }
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, tokens in (("train", 3000), ("val", 1000)):
        write_random_tokens(tmp_path / name, vocabulary=50, tokens=tokens)
    (tmp_path / "rows.toml").write_text(FAKE)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> None:
        usual = ["--data", "train", "--validation", "val", "--rows-file", "rows.toml"]
        usual += ["--trials", "2", "--trial-tokens", "64", "--tokens", "128", "--points", "2"]
        usual += ["--seeds", "1", "2", "--batch", "2", "--context", "16", "--width", "8"]
        monkeypatch.setattr(sys, "argv", ["optimizers.py", *usual, *words])
        script.main()

    return call


@pytest.mark.slow
def test_a_sweep_is_interrupted_and_goes_on(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    command("--rows", "muon", "--only-trials", "--output", str(file), "--limit", "-1")
    assert "the limit is reached" in capsys.readouterr().out
    command("--rows", "muon", "--only-trials", "--resume", str(file))
    first = results.read_sweep(file)
    assert [run.group for run in first.runs] == ["trial"] * 2
    assert [len(run.curve) for run in first.runs] == [1, 1]
    command("--resume", str(file))
    done = results.read_sweep(file)
    assert done.runs[:2] == first.runs
    made = [(run.name.partition("@")[0], run.seed) for run in done.runs if run.error is None]
    assert made[2:] == [
        *[("trial/fake", 1)] * 2,
        *[("final/muon", 1), ("final/fake", 1), ("final/muon", 2), ("final/fake", 2)],
    ]
    [failed] = [run for run in done.runs if run.error is not None]
    assert failed.name.startswith("trial/wrong@") and "no_such_setting" in failed.error
    said = capsys.readouterr().out
    assert "wrong: no final run, since not all of its trials are made" in said
    assert "Muon ends at" in said and "Muon, plain" in said
    final = next(run for run in done.runs if run.name.startswith("final/fake"))
    assert final.settings["optim"]["normalise"] == "none" and final.steps == 4
    assert len({run.settings["schedule"]["warmup"] for run in done.runs if run.settings}) == 1


def test_a_result_file_is_not_overwritten(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text("kept")
    with pytest.raises(SystemExit):
        command("--output", "result.json")
    assert "go on with --resume result.json" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"result.json: not a result of optimizers\.py"):
        command("--resume", "result.json")
    assert (tmp_path / "result.json").read_text() == "kept"


def test_a_plan_counts_runs_and_tokens(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command("--plan", "--rows", "muon,fake", "--rate", "100")
    said = capsys.readouterr().out
    # 2 rows x 2 trials, and for each row 2 seeds.
    assert "4 trials: 64 tokens each, 256 in all" in said
    assert "4 final runs, at most: 128 tokens each, 512 in all" in said
    assert "8 runs: 768 tokens" in said
