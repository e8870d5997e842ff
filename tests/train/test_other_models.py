"""A model of a quite different kind goes through everything: a recurrent network without attention,
with other parameter names, other settings, a buffer, layers that do not cast their weights, and
none of the abilities that layouts ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import pytest
import torch
from torch import nn

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import open_model
from gristmill.config.load import load_text
from gristmill.config.model import ModelConfig, Role
from gristmill.config.resolve import padded
from gristmill.config.schema import MODEL_KINDS, RunConfig, any_model
from gristmill.evaluate.loss import evaluate_loss, evaluation_ids
from gristmill.export.folder import export
from gristmill.generate.engine import Engine
from gristmill.generate.sampling import Sampling
from gristmill.models import build
from gristmill.models.build import build_meta_model, build_model, materialise
from gristmill.models.cache import Cache
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms
from gristmill.models.spec import PLAIN_EXECUTION, WHOLE, CausalLM, Execution, Loss, ModelShard
from gristmill.plan.arithmetic import TokenCost
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

Crowd = Callable[..., list[Any]]
CPU = torch.device("cpu")


class RecurrentConfig(ModelConfig):
    """A stack of gated averages over time."""

    kind: ClassVar[str] = "recurrent"
    marks: ClassVar[frozenset[str]] = frozenset({"recurrent"})
    not_of_weights: ClassVar[frozenset[str]] = frozenset({"start", "dropout", "vocab"})
    recurrent: Literal[True]
    """Marks the table."""
    size: int
    """Features."""
    cells: int
    """How many are stacked."""
    context: int
    """Longest sequence."""
    vocab: int | None = None
    """Ids."""
    vocab_multiple: int = 8
    """Padding."""
    dropout: float = 0.0
    """None is used."""
    start: str | None = None
    """Weights to begin with."""


@dataclass
class Memory:
    """What each cell remembers."""

    length: int = 0
    states: dict[int, torch.Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        self.length, self.states = 0, {}

    def branch(self, rows_B: torch.Tensor) -> Memory:
        states = {number: state[rows_B] for number, state in self.states.items()}
        return Memory(self.length, states)


class Cell(nn.Module):
    slowest: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gates, self.candidates = nn.Linear(size, size), nn.Linear(size, size)
        self.register_buffer("slowest", torch.empty(size), persistent=False)

    def forward(self, x_BTD: torch.Tensor, state_BD: torch.Tensor | None = None) -> torch.Tensor:
        open_BTD = torch.sigmoid(self.gates(x_BTD)).clamp(min=self.slowest)
        new_BTD = torch.tanh(self.candidates(x_BTD))
        state_BD = torch.zeros_like(new_BTD[:, 0]) if state_BD is None else state_BD
        seen = []
        for t in range(x_BTD.shape[1]):
            state_BD = torch.lerp(state_BD, new_BTD[:, t], open_BTD[:, t].to(new_BTD.dtype))
            seen.append(state_BD)
        return torch.stack(seen, dim=1)


class Recurrent(CausalLM):
    config: RecurrentConfig

    def __init__(
        self,
        config: RecurrentConfig,
        *,
        vocab: int,
        shard: ModelShard = WHOLE,
        execution: Execution = PLAIN_EXECUTION,
        pad_for: int = 1,
    ) -> None:
        super().__init__(config, vocab=vocab, shard=shard, execution=execution)
        rows = padded(vocab, config, ranks=pad_for)
        self.letters = nn.Embedding(rows, config.size)
        self.stack = nn.ModuleList(Cell(config.size) for _ in range(config.cells))
        self.scores = nn.Linear(config.size, rows, bias=False)

    def forward(
        self,
        tokens_BT: torch.Tensor,
        *,
        targets_BT: torch.Tensor | None = None,
        terms: LossTerms = PLAIN_LOSS,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_at_N: torch.Tensor | None = None,
    ) -> torch.Tensor | Loss:
        assert cache is None or isinstance(cache, Memory)
        x_BTD = self.letters(tokens_BT).to(self.compute)
        for number, cell in enumerate(self.stack):
            seen_BTD = cell(x_BTD, None if cache is None else cache.states.get(number))
            if cache is not None:
                cache.states[number] = seen_BTD[:, -1]
            x_BTD = x_BTD + seen_BTD
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        if targets_BT is None:
            kept = x_BTD if logits_at_N is None else x_BTD.flatten(0, 1)[logits_at_N]
            return self.scores(kept)[..., : self.vocab]
        return linear_cross_entropy(x_BTD, self.scores.weight, targets_BT, terms, vocab=self.vocab)

    def new_cache(self, capacity: int | None = None) -> Memory:
        return Memory()

    def token_cost(self, sequence: int, *, sampled: int | None = None) -> TokenCost:
        size = sum(p.numel() for p in self.parameters()) - self.letters.weight.numel()
        return TokenCost(6.0 * size, 6.0 * size)

    def roles(self) -> dict[str, Role]:
        tables = {"letters.weight": Role.EMBEDDING, "scores.weight": Role.HEAD}
        return {
            name: tables.get(name, Role.VECTOR if one.dim() < 2 else Role.MATRIX)
            for name, one in self.named_parameters()
        }

    def vocabulary_parameters(self) -> frozenset[str]:
        return frozenset({"letters.weight", "scores.weight"})

    def initialise(self, seed: int, names: Iterable[str] | None = None) -> None:
        for name in dict(self.named_parameters()) if names is None else names:
            parameter = self.get_parameter(name)
            generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
            with torch.no_grad():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def reset_buffers(self) -> None:
        for cell in self.stack:
            assert isinstance(cell, Cell)
            cell.slowest.copy_(torch.linspace(0.01, 0.2, len(cell.slowest)))

    def block_names(self) -> Sequence[str]:
        return [f"stack.{number}" for number in range(len(self.stack))]


@contextlib.contextmanager
def recurrent_models() -> Iterator[None]:
    """What adding a kind of model touches: its settings, and a row in the table of constructors."""
    before = dict(MODEL_KINDS)

    def know(kinds: dict[str, type[ModelConfig]]) -> None:
        MODEL_KINDS.clear()
        MODEL_KINDS.update(kinds)
        field = RunConfig.model_fields["model"]
        field.annotation, *field.metadata = get_args(any_model(kinds))
        RunConfig.model_rebuild(force=True)

    build.MODELS[RecurrentConfig] = Recurrent
    know({**before, "recurrent": RecurrentConfig})
    try:
        yield
    finally:
        del build.MODELS[RecurrentConfig]
        know(before)


@pytest.fixture
def known() -> Iterator[None]:
    with recurrent_models():
        yield


RUN = """
name = "other"
folder = "{folder}"
model = {{ recurrent = true, size = 16, cells = 3, context = 24 }}
data = {{ paths = "{tokens}", split = "90,10" }}
train = {{ until = "12 steps", batch = 4, accumulate = 2 }}
optim.lr = 1e-2
validate = {{ every = "4 steps", windows = 8 }}
checkpoint.every = "3 steps"
runtime = {{ device = "cpu", threads = 1 }}
"""


def other(tokens: Path, folder: Path, *words: str) -> RunConfig:
    return load_text(RUN.format(folder=folder, tokens=tokens), words, place="other.toml")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ('optim.type="muon"', "optim.lr=0.02"),
        ('train.recompute="full"', 'precision.compute="bf16"'),
    ],
    ids=["adamw", "muon", "recomputed in bf16"],
)
def test_it_trains_and_resumes_exactly(
    known: None,
    tokens: Path,
    tmp_path: Path,
    runs: Runs,
    stop_after: Callable[[int], None],
    words: tuple[str, ...],
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert Run(other(tokens, whole, *words)).train().exit is Exit.DONE
    stop_after(5)
    assert Run(other(tokens, parted, *words)).train().exit is Exit.STOPPED
    assert Run(other(tokens, parted, *words)).train().exit is Exit.DONE
    runs.assert_same(whole, parted)
    losses = [line["loss"] for line in runs.history(whole) if line["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def train_recurrent(tokens: str, folder: str, *words: str) -> int:
    with recurrent_models():
        return int(Run(other(Path(tokens), Path(folder), *words)).train().exit)


@pytest.mark.parametrize(
    "layout",
    ["parallel.dp_shard=2", pytest.param("parallel.dp_replicate=2", marks=pytest.mark.slow)],
)
def test_it_is_sharded(
    known: None, crowd: Crowd, tokens: Path, tmp_path: Path, runs: Runs, layout: str
) -> None:
    Run(other(tokens, tmp_path / "one", "optim.eps=1e-4")).train()
    args = (str(tokens), str(tmp_path / "two"), "optim.eps=1e-4", layout, "train.accumulate=1")
    assert crowd(2, train_recurrent, *args) == [0, 0]
    one, two = (
        [line["loss"] for line in runs.history(tmp_path / name) if line["kind"] == "step"]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-5)
    weights = runs.tensors(tmp_path / "two")
    assert {"model:stack.2.gates.weight", "optimizer:exp_avg/letters.weight"} < weights.keys()


def test_it_generates_and_is_evaluated(known: None, tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(other(tokens, folder)).train()
    loaded = open_model(str(folder), device=CPU)
    assert isinstance(loaded.model, Recurrent)
    # Buffers are not in checkpoints, and are there all the same.
    assert loaded.model.stack[0].slowest.max() == pytest.approx(0.2)
    greedy = Sampling(temperature=0.0)
    texts = [
        engine.generate([[1, 2, 3]], tokens=40, sampling=greedy)[0]
        for engine in (Engine(loaded.model), Engine(loaded.model, cached=False))
    ]
    # Beyond its window the cached model starts again from half of it, as any model does.
    assert texts[0] == texts[1]
    text = evaluation_ids(loaded, data=None, text=None)
    assert 1.0 < evaluate_loss(loaded, text.ids, limit=200).loss < 5.0
    from gristmill.checkpoint.model import open_stored

    with pytest.raises(UserError, match="recurrent models have no Hugging Face form"):
        export(open_stored(str(folder)), tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("parallel.tp=2",), "parallel.tp: needs tensor parallelism"),
        (("parallel.cp=2",), "parallel.cp: needs context parallelism"),
        (("parallel.pp=2",), "parallel.pp: needs pipeline stages"),
        (('data.documents="masked"',), "data.documents: needs attention masks for packed"),
        (("train.sampled_softmax=64",), "train.sampled_softmax: needs a sampled softmax"),
        (("train.mtp=0.5",), "train.mtp: needs a loss of the token after"),
        (('precision.fp8=["head"]', 'precision.compute="bf16"'), "needs products in fp8"),
    ],
)
def test_what_it_cannot_do_is_refused_when_the_file_is_read(
    known: None, tokens: Path, tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(UserError) as error:
        other(tokens, tmp_path, *words)
    assert problem in str(error.value)
    assert "which recurrent models do not have" in str(error.value)


def test_its_settings_are_part_of_its_identity(known: None, tokens: Path, tmp_path: Path) -> None:
    Run(other(tokens, tmp_path / "run", 'train.until="3 steps"')).train()
    with pytest.raises(UserError, match=r"model\.size: was 16 and is now 24"):
        Run(other(tokens, tmp_path / "run", "model.size=24")).train()


def test_an_outline_has_no_memory(known: None) -> None:
    config = RecurrentConfig(recurrent=True, size=2**20, cells=2, context=8)
    model = build_meta_model(config, vocab=300)
    assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))
    small = build_model(config.model_copy(update={"size": 8}), vocab=300, device=CPU)
    assert small.get_buffer("stack.1.slowest")[0] == pytest.approx(0.01)


def test_buffers_with_a_value_keep_it_when_a_model_gets_memory(known: None) -> None:
    """Models from elsewhere compute some of their buffers when they are built."""
    config = RecurrentConfig(recurrent=True, size=8, cells=1, context=8)
    model = build_meta_model(config, vocab=300)
    model.register_buffer("inverse_frequencies", torch.arange(4.0), persistent=False)
    materialise(model, CPU)
    assert model.get_buffer("inverse_frequencies").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
