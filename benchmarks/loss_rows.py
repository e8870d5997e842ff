"""The rows of `time_to_loss.py`: recipes of the baseline, variants of ours, and the ablation.

    nanogpt/NAME   a `Recipe`: rate and batch of nanoGPT's recipe
    nanochat/NAME  a `NanochatRecipe`: a factor of nanochat's rates, its decay, batch and size
    NAME           a `Change` of our preset that is run with several horizons
    ablate/NAME    a `Change` of one part, run with one horizon for all

A file of further rows, for --runs, has a table for each:

    [nanogpt.small]
    lr = 1e-3
    batch = 8
    tokens = "1M"
    [nanochat.twice]
    scale = 2.0
    [ours.slower]
    about = "half the rate"
    set   = ["optim.lr=0.01"]
    [ablate.no-cap]
    set   = ["model.logit_cap=unset"]
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.errors import UserError
from gristmill.base.units import Duration


@dataclass(frozen=True)
class Recipe:
    """A row of the baseline."""

    lr: float
    batch: int
    """Windows in a step."""
    tokens: str = "118M"

    @property
    def about(self) -> str:
        return f"lr {self.lr:g}, {self.batch} windows a step"


@dataclass(frozen=True)
class NanochatRecipe:
    """A row of the other baseline."""

    scale: float
    """Of all of its rates."""
    decay: float = 0.1
    """Of the matrices, at the start: it falls to zero."""
    batch: int = 32
    tokens: str = "23M"
    layers: int | None = None
    width: int | None = None
    """Those of --baseline-preset if not given."""

    @property
    def about(self) -> str:
        rates = f"rates x {self.scale:g}, decay {self.decay:g}, {self.batch} windows a step"
        size = f", {self.layers} layers of width {self.width}" if self.layers else ""
        return f"nanochat{size}, {rates}"


@dataclass(frozen=True)
class Change:
    """Ours with some settings changed, by words as on the command line."""

    about: str = ""
    set: Sequence[str] = ()
    preset: str | None = None
    """That of --preset if not given."""
    tokens: Sequence[str] = ("22M", "24M")
    """Horizons, unless --tokens names others."""


# The rows that are likely to be good come first, so that a --limit cuts the others.
BASELINE = {
    "1e-3x32": Recipe(1e-3, 32),
    "1e-3x64": Recipe(1e-3, 64),
    "6e-4x32": Recipe(6e-4, 32),
    "6e-4x16": Recipe(6e-4, 16),
    "1e-3x16": Recipe(1e-3, 16),
    "2e-3x32": Recipe(2e-3, 32),
    "2e-3x64": Recipe(2e-3, 64),
    "6e-4x64": Recipe(6e-4, 64),
    "3e-4x16": Recipe(3e-4, 16),
    "6e-4x128": Recipe(6e-4, 128),
    "1.8e-3x128": Recipe(1.8e-3, 128),
}

# nanochat's own rule for this batch gives 0.25 of the rates; the best was found far above it.
NANOCHAT = {
    "1.6": NanochatRecipe(1.6),
    "1": NanochatRecipe(1.0),
    "1-decay-0.28": NanochatRecipe(1.0, decay=0.28),
    "2.2": NanochatRecipe(2.2),
    "0.5": NanochatRecipe(0.5),
    "0.25": NanochatRecipe(0.25),
    "1.6x16": NanochatRecipe(1.6, batch=16),
    "1x16": NanochatRecipe(1.0, batch=16),
    # Half of the size reaches the loss with more tokens in less time.
    "1.6-8x512": NanochatRecipe(1.6, tokens="30M", layers=8, width=512),
    "1-8x512": NanochatRecipe(1.0, tokens="30M", layers=8, width=512),
}

OURS = {
    "modern-small": Change("`modern-small`", preset="modern-small"),
    "modern-mini": Change("`modern-mini`", preset="modern-mini", tokens=["28M", "30M"]),
    "modern-fp8": Change("the preset, head in fp8", ['precision.fp8=["head"]']),
}

# With AdamW's rates an embedding as large as the preset's would hardly move.
_ADAMW = ('optim.type="adamw"', "schedule.warmup=0.05", "model.embedding_std=unset")

ABLATION = {
    "preset": Change("nothing changed"),
    "values-0": Change("no value embeddings", ["model.value_embeddings=0"]),
    "values-2": Change("2 value embeddings", ["model.value_embeddings=2"]),
    "values-6": Change("6 value embeddings", ["model.value_embeddings=6"]),
    "no-gate": Change("no gates of attention", ["model.attention_gate=false"]),
    "full-softmax": Change("the loss over the whole vocabulary", ["train.sampled_softmax=unset"]),
    "sampled-8k": Change("the loss over 8192 tokens of it", ["train.sampled_softmax=8192"]),
    "lr-0.03": Change("rate of matrices 0.03", ["optim.lr=0.03"]),
    "tied-head": Change(
        "tied head, small embedding with the rate 0.004",
        ["model.tie_head=true", "model.embedding_std=unset", "optim.embedding_lr=0.004"],
    ),
    "no-cap": Change("no soft cap on logits", ["model.logit_cap=unset"]),
    "no-zero-init": Change("projections do not start at zero", ["model.zero_init=false"]),
    "no-qk-norm": Change(
        "no norm of queries and keys", ["model.qk_norm=false", "model.attention_scale=unset"]
    ),
    "gelu": Change("gelu_tanh instead of relu2", ['model.activation="gelu_tanh"']),
    "learned-positions": Change("learned positions", ['model.positions="learned"']),
    "layernorm": Change("LayerNorm with gains", ['model.norm="layernorm"', "model.norm_gain=true"]),
    "heads-12": Change("12 heads", ["model.heads=12"]),
    "adamw-1e-3": Change("AdamW, lr 1e-3, warm-up 5 %", [*_ADAMW, "optim.lr=1e-3"]),
    "adamw-3e-3": Change("AdamW, lr 3e-3, warm-up 5 %", [*_ADAMW, "optim.lr=3e-3"]),
    "no-momentum-warmup": Change("momentum 0.95 from the start", ["optim.momentum_warmup=0"]),
    "plain-muon": Change("Muon without NorMuon's norms", ['optim.normalise="none"']),
    "cautious": Change(
        "cautious decay, of 0.1 since it is weaker",
        ["optim.cautious=true", "optim.weight_decay=0.1"],
    ),
    "quintic": Change("one quintic for all steps", ['optim.coefficients="quintic"']),
    "steps-3": Change("3 steps of orthogonalising", ["optim.steps=3"]),
    "decay-0.4": Change("rate falls over the last 40 %", ["schedule.decay=0.4"]),
    "decay-0.6": Change("rate falls over the last 60 %", ["schedule.decay=0.6"]),
    "cosine": Change("cosine schedule", ['schedule.type="cosine"', "schedule.warmup=0"]),
    "batch-16": Change("16 windows a step", ["train.batch=16"]),
    "batch-64": Change("64 windows a step", ["train.batch=64"]),
    "ramp": Change(
        "16 windows a step for the first 30 %",
        ["train.ramp.start=16", "train.ramp.by=16", "train.ramp.over=0.3"],
    ),
    "random-order": Change("windows from random places", ['data.order="random"']),
    "masked": Change("documents masked, in validation too", ['data.documents="masked"']),
}


def rows_by_name(more: Path | None) -> dict[str, Recipe | NanochatRecipe | Change]:
    """All rows there are, those of a file among them."""
    read = tomllib.loads(more.read_text()) if more else {}
    unknown = set(read) - {"nanogpt", "nanochat", "ours", "ablate"}
    if unknown:
        raise SystemExit(f"{more}: [{unknown.pop()}] is none of nanogpt, nanochat, ours, ablate")
    try:
        recipes = BASELINE | {name: Recipe(**row) for name, row in read.get("nanogpt", {}).items()}
        chat = read.get("nanochat", {}).items()
        chats = NANOCHAT | {name: NanochatRecipe(**row) for name, row in chat}
        ours = OURS | {name: Change(**row) for name, row in read.get("ours", {}).items()}
        ablate = ABLATION | {name: Change(**row) for name, row in read.get("ablate", {}).items()}
    except TypeError as error:
        raise SystemExit(f"{more}: {error}") from None
    return {
        **{f"nanogpt/{name}": row for name, row in recipes.items()},
        **{f"nanochat/{name}": row for name, row in chats.items()},
        **ours,
        **{f"ablate/{name}": row for name, row in ablate.items()},
    }


def amount(text: str) -> int:
    """A number of tokens such as 118M."""
    try:
        return Duration.parse(f"{text} tokens").amount
    except UserError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens") from error
