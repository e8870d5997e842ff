"""Any causal language model of transformers, trained, sampled and saved as our own.

    tokens -> body (transformers' own) -> hidden states -> head -> logits, or the loss in slices

Its modules are children of the model here, so parameters have the names that transformers gives
them. If its class does something unknown to its logits, the loss is computed from the whole logits
that it returns.

Code in a model's repository is never run.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.hf import HFConfig, model_type
from gristmill.config.model import Role
from gristmill.models.cache import Cache
from gristmill.models.counter_rng import counter_rng
from gristmill.models.families import open_foreign
from gristmill.models.hf_classes import (
    block_names_of,
    body_of,
    library,
    logit_function,
    meta_model,
)
from gristmill.models.loss import linear_cross_entropy, sums_of
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms
from gristmill.models.spec import PLAIN_EXECUTION, WHOLE, CausalLM, Execution, Loss, ModelShard
from gristmill.models.weights import TensorParts, Weights, WeightsInMemory
from gristmill.plan.arithmetic import TokenCost


class HFModel(CausalLM):
    """A causal language model that transformers computes."""

    config: HFConfig

    def __init__(
        self,
        config: HFConfig,
        *,
        vocab: int,
        shard: ModelShard = WHOLE,
        execution: Execution = PLAIN_EXECUTION,
        pad_for: int = 1,
    ) -> None:
        assert shard == WHOLE and pad_for == 1, "layouts that divide a model are refused"
        super().__init__(config, vocab=vocab, shard=shard, execution=execution)
        inner = meta_model(config)
        # Not a child: parameters would get another prefix than they have in transformers.
        self._held = (inner,)
        for name, child in inner.named_children():
            self.add_module(name, child)
        for name, parameter in inner.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        named = dict(inner.named_parameters(remove_duplicate=False))
        first = {id(one): name for name, one in reversed(named.items())}
        self._tied = {name: first[id(one)] for name, one in named.items()}
        self._constructed = {
            name: one.constructed for name, one in named.items() if hasattr(one, "constructed")
        }
        self._blocks = block_names_of(inner)
        with torch.device("cpu"):
            self._logits = logit_function(inner)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                # Autocast leaves embeddings in fp32, and with them the residual stream.
                module.register_forward_hook(self._in_compute_dtype)

    @property
    def inner(self) -> Any:
        """The model of transformers, which shares all modules with this one."""
        return self._held[0]

    def train(self, mode: bool = True) -> HFModel:
        self.inner.training = mode
        super().train(mode)
        return self

    # -------------------------------------------------------------- computation

    def _in_compute_dtype(self, module: nn.Module, inputs: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.compute)

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
        assert positions_BT is None and documents_BT is None, "packed documents are refused"
        if targets_BT is not None and self._logits is not None:
            hidden_BTD = body_of(self.inner)(input_ids=tokens_BT, use_cache=False)[0]
            return self._loss(hidden_BTD, targets_BT, terms)
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            assert isinstance(cache, HFCache)
            options["past_key_values"] = cache.inner
            cache.length += tokens_BT.shape[1]
        if logits_at_N is not None and self._logits is not None:
            head = self.inner.get_output_embeddings()
            hidden_BTD = body_of(self.inner)(input_ids=tokens_BT, **options)[0]
            return self._logits(head(hidden_BTD.flatten(0, 1)[logits_at_N]))
        logits_BTV: torch.Tensor = self.inner(input_ids=tokens_BT, **options).logits
        if targets_BT is not None:
            return _plain_loss(logits_BTV, targets_BT, terms)
        return logits_BTV if logits_at_N is None else logits_BTV.flatten(0, 1)[logits_at_N]

    def _loss(self, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor, terms: LossTerms) -> Loss:
        logits, head = self._logits, self.inner.get_output_embeddings()
        assert logits is not None
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            hidden_BTD = hidden_BTD.to(self.compute)
            return linear_cross_entropy(
                hidden_BTD if logits.factor == 1 else hidden_BTD * logits.factor,
                head.weight,
                targets_BT,
                terms._replace(cap=logits.cap),
                vocab=self.vocab,
                bias_V=head.bias,
                kernel=self.kernels.loss,
            )

    def new_cache(self, capacity: int | None = None) -> HFCache | None:
        return None if getattr(self.inner, "_is_stateful", False) else HFCache(self.inner.config)

    def token_cost(self, sequence: int, *, sampled: int | None = None) -> TokenCost:
        config, roles = self.inner.config, self.roles()
        matrices = [
            (parameter, self._share_used(name, parameter))
            for name, parameter in self.named_parameters()
            if roles[self.canonical_name(name)] is Role.MATRIX
        ]
        matrices.append((self.inner.get_output_embeddings().weight, 1.0))
        # The gradients of frozen weights are not computed.
        products = sum((6 if one.requires_grad else 4) * one.numel() * n for one, n in matrices)
        layers, width = len(self._blocks), int(getattr(config, "hidden_size", 0))
        heads, head_width = (getattr(config, key, None) for key in _ATTENTION_SIZES)
        attention = layers * sequence * (heads * head_width if heads and head_width else width)
        return TokenCost(products + 12.0 * attention, products + 6.0 * attention)

    def _share_used(self, name: str, parameter: torch.Tensor) -> float:
        """The part of a parameter that a token uses: some of the experts, if it holds those."""
        config = self.inner.config
        experts = next((n for key in _EXPERTS if (n := getattr(config, key, None))), None)
        chosen = getattr(config, "num_experts_per_tok", None)
        if not isinstance(experts, int) or not isinstance(chosen, int) or ".experts." not in name:
            return 1.0
        return chosen / experts

    # -------------------------------------------------------------- parameters

    def canonical_name(self, name: str) -> str:
        return self._tied.get(name, name)

    def names_of(self, canonical: str) -> list[str]:
        """All names of a parameter; more than one if it is tied."""
        return [name for name, first in self._tied.items() if first == canonical]

    def tie(self) -> None:
        modules = dict(self.inner.named_modules())
        for name, first in self._tied.items():
            if name != first:
                here, _, own = name.rpartition(".")
                there, _, other = first.rpartition(".")
                modules[here].register_parameter(own, getattr(modules[there], other))

    def roles(self) -> dict[str, Role]:
        tables = {
            f"{name}.weight"
            for name, module in self.named_modules()
            if isinstance(module, nn.Embedding)
        }
        head = self.inner.get_output_embeddings().weight
        found: dict[str, Role] = {}
        for name, one in self.named_parameters():
            role = Role.MATRIX if one.dim() > 1 else Role.VECTOR
            role = Role.HEAD if one is head else role
            canonical = self.canonical_name(name)
            found[canonical] = Role.EMBEDDING if canonical in tables else role
        return found

    def block_names(self) -> Sequence[str]:
        return self._blocks

    # -------------------------------------------------------------- initialisation

    @torch.no_grad()
    def initialise(self, seed: int, names: Iterable[str] | None = None) -> None:
        """As transformers draws them, with numbers that depend on the run's seed and the module's
        name alone."""
        own = dict(self.named_parameters(remove_duplicate=False))
        chosen = set(own if names is None else names)
        for name in chosen:
            own[name].copy_(self._constructed.get(name, torch.tensor(math.nan)))
        modules = [(name, module) for name, module in self.named_modules() if name]
        for name, module in reversed(modules):
            inside = [f"{name}.{one}" for one, _ in module.named_parameters()]
            direct = [f"{name}.{one}" for one, _ in module.named_parameters(recurse=False)]
            if (inside and chosen.issuperset(inside)) or (direct and chosen.issuperset(direct)):
                with _seeded(f"{seed}:{name}", self.device), counter_rng(seed, name):
                    self.inner._init_weights(module)
        left = [name for name in chosen if own[name].isnan().any()]
        if left:
            kind = type(self.inner).__name__
            raise UserError(
                f"transformers does not say how to draw the initial {left[0]} of {kind}",
                where="model.hf",
                remedy='start from its weights: model.init = "pretrained"',
            )


_ATTENTION_SIZES = ("num_attention_heads", "head_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class HFForm(NamedTuple):
    """How transformers knows a model."""

    architecture: str
    """The class."""
    settings: dict[str, Any]
    """The content of config.json."""


def hf_form(model: CausalLM, *, end_of_text: int) -> HFForm | None:
    """The class and config.json of a model of transformers; None for any other."""
    if not isinstance(model, HFModel):
        return None
    architecture = type(model.inner).__name__
    settings = {
        **model.inner.config.to_dict(),
        "architectures": [architecture],
        "dtype": "float32",
        "eos_token_id": end_of_text,
        "use_cache": True,
    }
    return HFForm(architecture, settings)


class HFCache:
    """The keys and values that a model of transformers keeps."""

    def __init__(self, config: Any) -> None:
        self._config, self.length = config, 0
        self.clear()

    def clear(self) -> None:
        self.length = 0
        self.inner = library().DynamicCache(config=self._config)

    def branch(self, rows_B: torch.Tensor) -> HFCache:
        other = HFCache(self._config)
        other.inner, other.length = copy.deepcopy(self.inner), self.length
        other.inner.batch_select_indices(rows_B)
        return other


def _plain_loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor, terms: LossTerms) -> Loss:
    losses_N = functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none"
    )
    if terms.loss_weights_BT is not None:
        losses_N = losses_N * terms.loss_weights_BT.flatten()
    if terms.by_sample:
        total = torch.stack([losses_T.sum() for losses_T in losses_N.view_as(targets_BT)])
    else:
        if terms.sources_B is not None:
            sources_BT = terms.sources_B[:, None].expand_as(targets_BT)
            terms = terms._replace(sources_B=sources_BT.flatten())
        total = sums_of(losses_N, terms)
    scaled = total[0] if terms.sources else total
    return Loss(scaled if terms.scale is None else scaled * terms.scale, total.detach())


@contextmanager
def _seeded(text: str, device: torch.device) -> Iterator[None]:
    """The default generators, seeded by a text, and afterwards as they were: for what few models
    draw by other functions than most."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little"))
        yield


# ------------------------------------------------------------------ weights of a folder
#
# Most folders have exactly the names that the class in transformers gives its weights, or lack the
# prefix of the body, or hold a tied tensor under its other name. These are read a region at a time,
# so no second copy of the weights is ever in memory. Where transformers converts tensors when it
# loads them (such as experts that it stacks), it loads the model into host memory, and the regions
# come from there.


class RenamedWeights(Weights):
    """Tensors under other names."""

    def __init__(self, stored: Weights, names: Mapping[str, str]) -> None:
        self.where, self._stored, self._names = stored.where, stored, names
        self.shapes = {ours: stored.shapes[theirs] for ours, theirs in names.items()}

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        return self._stored.parts(self._names[name], region)


def folder_weights(stored: Weights, model: CausalLM, config: Any, *, folder: Path) -> Weights:
    """The parameters of a model, which needs no memory, from a Hugging Face folder whose tensors
    are `stored` and whose config.json has the content `config`."""
    if not isinstance(model, HFModel):
        return open_foreign(stored, model, model_type(config, where=str(folder)))
    names = {name: _find(name, stored, model) for name in model.roles()}
    found = {ours: theirs for ours, theirs in names.items() if theirs is not None}
    _refuse_trained_buffers(stored, model)
    if len(found) == len(names):
        return RenamedWeights(stored, found)
    return _converted(model, folder, missing=[name for name, one in names.items() if one is None])


def _find(name: str, stored: Weights, model: HFModel) -> str | None:
    prefix = f"{model.inner.base_model_prefix}."
    for one in model.names_of(name):
        for candidate in (one, one.removeprefix(prefix), f"{prefix}{one}"):
            if candidate in stored.shapes:
                return candidate
    return None


def _refuse_trained_buffers(stored: Weights, model: HFModel) -> None:
    """Checkpoints hold parameters only, and compute buffers anew."""
    parameters = dict(model.inner.named_parameters(remove_duplicate=False))
    for name, value in model.inner.state_dict().items():
        if name in parameters or name not in stored.shapes:
            continue
        if stored.shapes[name] != tuple(value.shape) or not torch.equal(
            stored.read(name), value.float().cpu()
        ):
            what = f"{name} is a buffer with values of its own, which a run here would not keep"
            raise DataError(what, where=stored.where)


def _converted(model: HFModel, folder: Path, *, missing: list[str]) -> Weights:
    transformers = library()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    problems: list[str] = []
    try:
        loaded, info = type(model.inner).from_pretrained(
            folder,
            config=model.inner.config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        problems += _described(info)
    except Exception as error:  # the library raises nothing more precise
        problems += [f"the weights lack {name}" for name in missing[:3]]
        problems += (str(error).strip().splitlines() or [type(error).__name__])[:1]
    if problems:
        raise DataError([Problem(what, str(folder)) for what in problems])
    return WeightsInMemory(
        {model.canonical_name(n): parameter for n, parameter in loaded.named_parameters()}
    )


def _described(info: Mapping[str, object]) -> Iterator[str]:
    missing, mismatched = info.get("missing_keys"), info.get("mismatched_keys")
    for names, what in ((missing, "the weights lack"), (mismatched, "of another shape:")):
        if isinstance(names, list | set | tuple) and names:
            yield f"{what} {', '.join(sorted(map(str, names))[:3])}"
