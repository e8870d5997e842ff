"""Drawing tokens by kernels, against `draw`; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gristmill.generate import kernels
from gristmill.generate.graphs import settings_row
from gristmill.generate.sampling import (
    NOT_FINITE,
    Sampling,
    draw,
    penalised,
    seen_tokens,
    uniform_numbers,
)
from gristmill.generate.steps import bias_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
BURST = 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, and often more tokens than a block keeps."""
    monkeypatch.setattr(kernels, "BLOCK", 128)
    monkeypatch.setattr(kernels, "KEPT", 16)


class Rows:
    """Rows of logits with their settings, drawn from once."""

    def __init__(
        self,
        logits_RV: torch.Tensor,
        samplings: list[Sampling],
        prompts: list[list[int]] | None = None,
    ) -> None:
        rows, vocab = logits_RV.shape
        self.prompts = prompts or [[]] * rows
        self.slots = list(reversed(range(rows)))  # not the order of the rows
        self.samplings, self.logits_RV = samplings, logits_RV
        biases = [bias_row(sampling, vocab) for sampling in samplings]
        self.biases = [torch.zeros(vocab) if bias is None else bias for bias in biases]
        self.seen = [seen_tokens(prompt, vocab) for prompt in self.prompts]
        settings = [
            settings_row(one, biased=bias is not None)
            for one, bias in zip(samplings, biases, strict=True)
        ]
        self.state = {
            "settings": self._by_slot(settings),
            "seen_SV": self._by_slot(self.seen),
            "bias_SV": self._by_slot(self.biases),
            "uniform_SU": self._by_slot([uniform_numbers(one.seed, 0, 4) for one in samplings]),
            "slots_R": torch.tensor(self.slots, dtype=torch.int32, device=DEVICE),
        }
        for name in ("tokens_S", "lengths_S", "drawn_S"):
            self.state[name] = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.state["ids_SB"] = torch.zeros(rows, BURST, dtype=torch.int32, device=DEVICE)

    def _by_slot(self, values: list[torch.Tensor]) -> torch.Tensor:
        ordered = [values[self.slots.index(slot)] for slot in range(len(values))]
        return torch.stack(ordered).to(DEVICE)

    def draw(self) -> list[int]:
        state: dict[str, Any] = dict(self.state)
        kernels.draw_rows(self.logits_RV.to(DEVICE), state.pop("settings"), **state, capacity=100)
        return [int(self.state["tokens_S"][slot]) for slot in self.slots]

    def expected(self) -> list[int]:
        ids = []
        for logits_V, sampling, seen_V, bias_V in zip(
            self.logits_RV, self.samplings, self.seen, self.biases, strict=True
        ):
            adjusted_V = penalised(logits_V, sampling, seen_V) + bias_V
            uniform = float(uniform_numbers(sampling.seed, 0, 1)[0])
            ids.append(draw(adjusted_V, sampling, uniform))
        return ids


def settings(chosen: random.Random, seed: int) -> Sampling:
    return Sampling(
        temperature=chosen.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=chosen.choice([0, 1, 5, 16, 17, 90, 10**6]),
        top_p=chosen.choice([1.0, 0.95, 0.5, 1e-6]),
        min_p=chosen.choice([0.0, 0.0, 0.05, 1.0]),
        repetition_penalty=chosen.choice([1.0, 1.3]),
        presence_penalty=chosen.choice([0.0, 0.5]),
        frequency_penalty=chosen.choice([0.0, -0.5]),
        bias=chosen.choice([{}, {3: 100.0, 7: -100.0}, {5: 2.0}]),
        seed=seed,
    )


# The interpreter takes half a second for a row.
@pytest.mark.parametrize("vocab", [50, 300, 50304] if ON_GPU else [50, 300])
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0], ids=["flat", "usual", "steep"])
def test_the_same_token_as_on_the_cpu(vocab: int, spread: float) -> None:
    chosen, count = random.Random(vocab), 64 if ON_GPU else 15
    logits_RV = spread * torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab))
    samplings = [settings(chosen, seed) for seed in range(count)]
    prompts = [[chosen.randrange(vocab) for _ in range(9)] for _ in range(count)]
    rows = Rows(logits_RV, samplings, prompts)
    assert rows.draw() == rows.expected()


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    logits_RV = torch.zeros(3, 300)
    logits_RV[1, [200, 40]] = 5.0
    logits_RV[2, 299] = 1.0
    assert Rows(logits_RV, [Sampling(temperature=0)] * 3).draw() == [0, 40, 299]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_no_token_comes_of_logits_that_are_not_finite(temperature: float, bad: float) -> None:
    logits_RV = torch.randn(2, 300)
    logits_RV[0, 170] = bad
    rows = Rows(logits_RV, [Sampling(temperature)] * 2)
    rows.draw()
    ids = [int(rows.state["ids_SB"][slot, 0]) for slot in rows.slots]
    assert ids[0] == NOT_FINITE
    assert ids[1] == rows.expected()[1]


def test_no_token_comes_where_none_is_allowed() -> None:
    rows = Rows(torch.randn(1, 300), [Sampling(bias={0: 1.0})])
    rows.state["bias_SV"].fill_(-torch.inf)
    rows.draw()
    assert int(rows.state["ids_SB"][0, 0]) == NOT_FINITE


def test_what_the_next_step_needs_is_written_down() -> None:
    rows = Rows(torch.randn(2, 50), [Sampling(repetition_penalty=1.2), Sampling()])
    rows.state["lengths_S"].copy_(torch.tensor([99, 3]))
    first, second = rows.draw(), rows.draw()
    kept = [rows.state["ids_SB"][slot, :2].tolist() for slot in rows.slots]
    assert kept == [list(pair) for pair in zip(first, second, strict=True)]
    assert rows.state["drawn_S"].tolist() == [2, 2]
    assert rows.state["lengths_S"].tolist() == [100, 5]  # never above the capacity
    slot = rows.slots[0]
    seen = rows.state["seen_SV"][slot].tolist()
    assert sum(seen) == 2 and all(seen[id] for id in (first[0], second[0]))
    assert not rows.state["seen_SV"][rows.slots[1]].any()
    # A slot that nobody has is computed again and again.
    for _ in range(4):
        rows.draw()
    assert rows.state["drawn_S"].tolist() == [4, 4]
