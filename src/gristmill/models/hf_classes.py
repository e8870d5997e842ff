"""Classes of transformers: building one without memory, its parts, and what it does to logits.

Parameters are outlined on `meta`; buffers are computed at once, since only constructors know how.

What a class does to its logits after the head (nothing, a factor, a soft cap) is found out by
calling its `forward` with a body and a head that return known numbers.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from gristmill.base.errors import UserError, optional
from gristmill.config.hf import HFConfig

_NOT_CAUSAL = frozenset({"xlm", "flaubert", "xlnet", "prophetnet", "git", "musicgen"})
"""Types with a class for language modelling that sees later tokens, or several streams of them."""


def library() -> Any:
    """The package transformers."""
    return optional("transformers", extra="hf", purpose="a model of Hugging Face")


def meta_model(config: HFConfig) -> Any:
    """The model with its parameters on `meta`."""
    transformers = library()
    settings = _library_config(config)
    classes = transformers.AutoModelForCausalLM._model_mapping
    kind = config.model_type
    if type(settings) not in classes.keys() or kind in _NOT_CAUSAL:  # noqa: SIM118
        raise UserError(
            f"{kind!r} is not a causal language model in transformers {transformers.__version__}",
            where="model.hf",
            remedy="choose one that has a class ...ForCausalLM",
        )
    try:
        with torch.device("cpu"), _parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    except UserError:
        raise
    except Exception as error:  # whatever a constructor says about sizes that do not fit
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"transformers cannot build this {kind} model: {first}", where="model.hf_config"
        ) from error
    if model.get_output_embeddings() is None:
        raise UserError(f"{kind!r} has no output head", where="model.hf")
    return model


def _library_config(config: HFConfig) -> Any:
    """The settings as transformers has them; refuses keys that it would silently ignore."""
    transformers = library()
    values = config.architecture()
    kind = values.pop("model_type")
    try:
        default = transformers.AutoConfig.for_model(kind)
    except ValueError as error:
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        near = ", ".join(difflib.get_close_matches(kind, known, n=3))
        raise UserError(
            f"transformers {transformers.__version__} knows no model type {kind!r}",
            where="model.hf",
            remedy=f"did you mean {near}?" if near else "a newer transformers may know it",
        ) from error
    except ImportError as error:
        raise UserError(str(error).strip().splitlines()[0], where="model.hf") from error
    try:
        made = transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:  # validation differs from class to class
        raise UserError(
            f"transformers refuses this config: {' '.join(str(error).split())}",
            where="model.hf_config",
        ) from error
    if hasattr(made, "is_decoder"):
        # Encoders see later tokens unless they are told not to.
        made.is_decoder = True
    if config.hf is None:
        # The config.json of a model may have keys that nobody reads.
        _check_keys(values, default, kind)
    return made


def _check_keys(values: dict[str, Any], default: Any, kind: str) -> None:
    known = {*default.to_dict(), *type(default).attribute_map, *dir(default)}
    for key in values:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if key not in known and near:
            raise UserError(
                f"the config of {kind!r} has no {key!r}",
                where="model.hf_config",
                remedy=f"did you mean {near[0]}?",
            )


_constructing = threading.Lock()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules constructed inside have parameters without memory, and buffers with it. Vectors
    remember the values that their constructor gave them: initialisation may not set them."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            outlined = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            if parameter.dim() < 2:
                outlined.constructed = parameter.detach().clone()  # type: ignore[attr-defined]
            parameter = outlined
        plain(module, name, parameter)

    with _constructing:
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = plain  # type: ignore[method-assign]


def body_of(inner: Any) -> Any:
    """The model without its head."""
    return getattr(inner, inner.base_model_prefix)


def block_names_of(inner: nn.Module) -> list[str]:
    """The largest list of modules of one class, which is not inside another such list."""
    best, size = [], -1
    for name, module in inner.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        held = sum(parameter.numel() for parameter in module.parameters())
        if held > size:
            best, size = [f"{name}.{number}" for number in range(len(module))], held
    return best


# ------------------------------------------------------------------ from hidden states to logits


class LogitFunction(NamedTuple):
    """What becomes of products z of head and hidden states: factor z, or cap tanh(that / cap)."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        z = self.factor * z
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)


_PROBES = (1e-3, -0.5, 1.0, -3.0, 8.0, 20.0, -47.0, 1e9)


@dataclass
class _BodyOutput:
    """What a body returns: hidden states, and nothing else."""

    last_hidden_state: torch.Tensor

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key]


class _StubBody(nn.Module):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    @property
    def decoder(self) -> _StubBody:
        """What some classes call instead of the body that holds it."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(self.hidden)


class _StubHead(nn.Module):
    """Returns known numbers if it gets the hidden states as they are."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight = nn.Parameter(torch.zeros(len(_PROBES), hidden.shape[-1]))
        self.called = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.called += torch.equal(hidden, self.hidden)
        return torch.tensor(_PROBES).expand(*hidden.shape[:-1], -1)


def logit_function(inner: Any) -> LogitFunction | None:
    """How this class computes logits from the output of its head; None if in another way, or if its
    hidden states do not come from its body."""
    head, prefix = inner.get_output_embeddings(), inner.base_model_prefix
    path = next((name for name, module in inner.named_modules() if module is head), "")
    if "." in path or not isinstance(head, nn.Linear) or prefix not in inner._modules:
        return None
    hidden = torch.linspace(-1, 1, 2 * head.in_features).view(1, 2, -1)
    stub, before = _StubHead(hidden), dict(inner._modules)
    try:
        inner._modules |= {prefix: _StubBody(hidden), path: stub}
        with torch.no_grad():
            found = inner(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    except Exception:  # a class that does something else
        return None
    finally:
        inner._modules.update(before)
    z = torch.tensor(_PROBES)
    if stub.called != 1 or found.shape != (1, 2, len(_PROBES)):
        return None
    got = found[0, 0].float()
    largest = float(got[-1])
    guess = LogitFunction(float(got[0] / z[0]), largest if largest < 1e6 else None)
    if abs(guess.factor - 1) < 1e-5:
        guess = guess._replace(factor=1.0)
    same = torch.allclose(guess(z), got, rtol=1e-4, atol=1e-7)
    return guess if same else None
