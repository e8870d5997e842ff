"""Settings of models that Hugging Face's transformers computes.

    hf          where the architecture comes from: a folder or a name, whose config.json is read
    hf_config   that config.json, with what the user changes in it; a run file keeps all of it, so
                that a run needs neither the folder nor the network again

TOML has no null: where config.json has one, the settings say "null".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, model_validator

from gristmill.config.lora import LoraConfig
from gristmill.config.model import ModelConfig
from gristmill.config.roles import Role
from gristmill.config.settings import UNSET
from gristmill.config.values import Count, Fraction

NULL = "null"
_NOT_OF_ARCHITECTURE = frozenset(
    (
        *("_name_or_path", "architectures", "auto_map", "transformers_version", "use_cache"),
        *("dtype", "torch_dtype", "id2label", "label2id", "task_specific_params"),
    )
)
"""Keys of a config.json that say nothing about what the model computes."""
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    *("seq_length", "n_ctx"),
)
_DROPOUT = frozenset(
    (
        *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"),
        *("dropout", "embed_dropout", "resid_dropout", "attn_dropout", "activation_dropout"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "emb_pdrop", "ffn_dropout"),
    )
)
"""What the models of transformers call their dropout rates."""


class HFConfig(ModelConfig):
    """Any causal language model of Hugging Face's transformers (extra `hf`)."""

    model_config = ConfigDict(json_schema_extra=lambda made: made.update(required=[]))
    kind: ClassVar[str] = "Hugging Face"
    marks: ClassVar[frozenset[str]] = frozenset({"hf", "hf_config"})
    not_of_weights: ClassVar[frozenset[str]] = ModelConfig.not_of_weights.union(
        ("hf", "init", "context")
    )
    vocab_multiple: ClassVar[int] = 1  # type: ignore[misc]

    hf: str | None = None
    """The model whose architecture is trained: a folder, or a Hugging Face name such as
    "EleutherAI/gpt-neo-125m" or, for one version of it, NAME@REVISION. Of it only config.json is
    read, unless init = "pretrained"."""
    hf_config: dict[str, Any]
    """What to change in its config.json, such as { n_layer = 4 }; or all of it, beginning with
    model_type, and then `hf` may be left out. "null" stands for null."""
    init: Literal["random", "pretrained"] = "random"
    """Initial weights: random ones as transformers draws them, or those of `hf`."""
    context: Count
    """Longest sequence; the number of positions in hf_config if not given, and at most that."""
    vocab: Count
    """Vocabulary size; vocab_size in hf_config if not given. It may exceed the tokenizer's."""
    dropout: Fraction = 0.0
    """Every dropout rate of the architecture; if not given, each is as in hf_config."""
    start: str | None = None
    """Start from the weights of this run folder, of a model with the same hf_config."""
    lora: LoraConfig | None = None
    """Train adapters of the initial weights instead of the weights; all weights if not given. Needs
    init = "pretrained" or `start`."""

    @model_validator(mode="before")
    @classmethod
    def _follow_architecture(cls, values: Any) -> Any:
        """Fill in what follows from hf_config, so that a written run file says it."""
        if not isinstance(values, dict) or not isinstance(values.get("hf_config", {}), dict):
            return values
        table = values.get("hf_config", {})
        config = {key: value for key, value in table.items() if value != UNSET}
        rates = [config[name] for name in _DROPOUT & set(config)]
        found = {
            "context": positions(config),
            "vocab": config.get("vocab_size"),
            "dropout": max((rate for rate in rates if isinstance(rate, float)), default=None),
        }
        followed = {name: one for name, one in found.items() if one is not None}
        return {**followed, **values, "hf_config": config}

    @property
    def roles(self) -> frozenset[Role]:
        """Known exactly only to the model: a value table is what none of them has."""
        return frozenset(Role) - {Role.TABLE}

    @property
    def initial_weights(self) -> str | None:
        return self.hf if self.init == "pretrained" else self.start

    @property
    def model_type(self) -> str:
        return str(self.hf_config.get("model_type"))

    @property
    def dropout_names(self) -> frozenset[str]:
        """Dropout rates in hf_config."""
        return _DROPOUT & set(self.hf_config)

    def architecture(self) -> dict[str, Any]:
        """The content of a config.json, with `vocab` and `dropout` in it."""
        values = _from_toml(self.hf_config)
        assert isinstance(values, dict)
        if self.dropout != max((values[name] or 0.0 for name in self.dropout_names), default=0.0):
            values |= dict.fromkeys(self.dropout_names, self.dropout)
        return {**values, "vocab_size": self.vocab}

    def identity(self) -> dict[str, Any]:
        config = {key: one for key, one in self.hf_config.items() if key not in _DROPOUT}
        return {"hf_config": config, **self.lora_identity()}

    @classmethod
    def identity_defaults(cls) -> dict[str, Any]:
        return {}


def positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that a config.json speaks of."""
    found = (config.get(name) for name in _POSITIONS)
    return next((one for one in found if isinstance(one, int) and one > 0), None)


def architecture_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_config` from the content of a config.json."""
    kept = {key: value for key, value in config.items() if key not in _NOT_OF_ARCHITECTURE}
    made = _to_toml(kept)
    assert isinstance(made, dict)
    return made


def _to_toml(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_toml(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_to_toml(one) for one in value]
    return NULL if value is None else value


def _from_toml(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_toml(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_from_toml(one) for one in value]
    return None if value == NULL else value
