"""Whether systems that are measured side by side compute the same function.

    ours, two layers of the real width    weights far larger than at the start of a training
      -> logits                           the same weights in a peer -> logits
    difference = largest distance of two logits / spread of all logits

At the weights a training begins with, any model of this kind predicts nearly the same. Here scores
of attention, inner features and logits have spreads of one and more, and biases and gains are
random too, so that another activation, another scale of attention or a forgotten bias shows. Logits
of rows that only pad the vocabulary are left out.

All is computed in fp32 on the CPU, wherever the systems are measured later: a GPU's memory stays
free, and no product is rounded to fewer digits. So compiled code and kernels are not looked at;
their tests are with the package.

nanoGPT has the GELU with the error function only. Where ours has the approximation with tanh,
nanoGPT is compared with ours set to the error function, and the line that is printed says that it
is measured beside another function.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers import BASE, GELUS, nanogpt_model, numbers_of, transformers_model

from gristmill.config.model import GPTConfig
from gristmill.config.schema import RunConfig
from gristmill.models.build import build_model
from gristmill.models.families import foreign_state
from gristmill.models.gpt import GPT

TOLERANCE = 1e-4
"""Rounding makes 1.5e-5 at most, at the widths of GPT-2; the two GELUs are 6e-4 apart."""
TOKENS = 256
VOCABULARY = 1000
"""Not a multiple of 64 or 128, so that rows are padded."""

Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """A peer beside ours."""

    peer: str
    difference: float
    activation: str
    """What ours was set to."""

    @property
    def same(self) -> bool:
        return self.difference < TOLERANCE


def check_same_function(configs: Mapping[str, RunConfig], *, nanogpt: Path) -> None:
    """Print how far the peers are from the first of ours, which they are built after, and end the
    program if one computes another function. Of further variants of ours only differences in their
    settings are printed."""
    config, *others = configs.values()
    found = compare_functions(config, nanogpt=nanogpt)
    for one in found:
        print(_line(one, own=config.model.activation), flush=True)
    for name, other in zip(list(configs)[1:], others, strict=True):
        first = dict(config.model)
        changed = [f"{key} = {value}" for key, value in other.model if first[key] != value]
        if changed:
            print(f"{name} is another model than the peers': {', '.join(changed)}", flush=True)
    failed = [one.peer for one in found if not one.same]
    if failed:
        raise SystemExit(f"not to be compared with ours: {', '.join(failed)}")


def _line(one: Comparison, *, own: str) -> str:
    does = "computes the same as" if one.same else "computes ANOTHER FUNCTION than"
    ours = f"ours, activation {own}"
    if one.activation != own:
        ours = f"ours with activation {one.activation}, but ours is measured with {own}"
    return f"{one.peer} {does} {ours}; logits {one.difference:.0e} apart"


def compare_functions(config: RunConfig, *, nanogpt: Path | None) -> list[Comparison]:
    """Ours beside nanoGPT, if there is a checkout, and transformers, if it is installed."""
    config = small_copy(config)
    ours, own = large_weights(config), config.model.activation
    found = []
    if nanogpt is not None:
        theirs = nanogpt_logits(config, ours, nanogpt)
        found.append(compare(BASE, ours, theirs, activation="gelu" if own in GELUS else own))
    if importlib.util.find_spec("transformers") is not None:
        theirs = transformers_logits(config, ours)
        found.append(compare("transformers", ours, theirs, activation=own))
    return found


def nanogpt_logits(config: RunConfig, ours: GPT, checkout: Path) -> Logits:
    """nanoGPT's logits by our weights; it gives those of all positions with targets only."""
    peer = fill(nanogpt_model(config, checkout), foreign_state(ours, "gpt2"), transposed=False)
    return lambda tokens_BT: peer(tokens_BT, tokens_BT)[0]


def transformers_logits(config: RunConfig, ours: GPT) -> Logits:
    peer = fill(transformers_model(config), foreign_state(ours, "gpt2"), transposed=True)
    return lambda tokens_BT: peer(tokens_BT).logits


def compare(name: str, ours: GPT, theirs: Logits, *, activation: str) -> Comparison:
    """How far a peer's logits are from ours with some activation."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, min(TOKENS, ours.config.context))
    tokens_BT = torch.randint(0, ours.vocab, shape, generator=generator)
    with torch.no_grad():
        expected = with_activation(ours, activation)(tokens_BT)
        logits = theirs(tokens_BT)[..., : ours.vocab]
    difference = (logits - expected).abs().max() / expected.std()
    return Comparison(name, float(difference), activation)


# ------------------------------------------------------------------ small models, large weights


def small_copy(config: RunConfig) -> RunConfig:
    """Two layers of a model with a small vocabulary, on the CPU; width and heads as they are."""
    vocab = min(VOCABULARY, numbers_of(config).vocab)
    model = config.model.model_copy(update={"layers": 2, "vocab": vocab, "dropout": 0.0})
    runtime = config.runtime.model_copy(update={"device": "cpu"})
    return config.model_copy(update={"model": model, "runtime": runtime})


def large_weights(config: RunConfig) -> GPT:
    """Ours, with weights that keep a normalised stream at spreads of one and more."""
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    model = build_model(config.model, vocab=numbers_of(config).vocab, device=cpu)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if parameter.dim() >= 2:
                parameter.mul_(1.5 / math.sqrt(parameter.shape[1]))
            else:
                parameter.mul_(0.3).add_(0.0 if name.endswith("bias") else 1.0)
    return model.eval()


def with_activation(model: GPT, activation: str) -> GPT:
    """The same weights, maybe with another activation."""
    if activation == model.config.activation:
        return model
    settings = model.config.model_dump() | {"activation": activation}
    other = build_model(
        GPTConfig.model_validate(settings), vocab=model.vocab, device=torch.device("cpu")
    )
    other.load_state_dict(model.state_dict())
    return other.eval()


def fill(model: Any, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> Any:
    """Load weights with Hugging Face's names into a peer; padded rows become zero.

    nanoGPT keeps linear layers untransposed, unlike Hugging Face's GPT-2.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = weights[name]
            if not transposed and ".c_" in name and tensor.dim() == 2:
                tensor = tensor.T
            parameter.zero_()
            parameter[: tensor.shape[0]].copy_(tensor)
    return model.eval()
