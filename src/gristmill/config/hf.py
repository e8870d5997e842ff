"""Model settings from the config.json of a Hugging Face model, and back.

    num_hidden_layers <-> layers    num_attention_heads <-> heads    rms_norm_eps <-> norm_eps   ...

`config/families.py` has the table of each family. What a config.json asks for that the native model
does not have is refused, and so is a model that no family can express. A model is expressed if its
settings are the same after they were written and read back. Biases and gains that a model does not
have are no difference: its tensors are written as zeros and ones, which compute the same.

A run folder serves as well: its `run.toml` holds the settings. So does a folder that was exported
with the model's own code, whose config.json has our names.

Settings of models that Hugging Face's transformers computes.

    hf          where the architecture comes from: a folder or a name, whose config.json is read
    hf_config   that config.json, with what the user changes in it; a run file keeps all of it, so
                that a run needs neither the folder nor the network again

TOML has no null: where config.json has one, the settings say "null".
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, ValidationError, model_validator

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.files import read_json
from gristmill.config.families import FAMILIES, WRITTEN, Family
from gristmill.config.lora import LoraConfig
from gristmill.config.model import GPTConfig, ModelConfig, Role
from gristmill.config.settings import UNSET, Count, Fraction

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
    "EleutherAI/gpt-neo-125m" or, for one version of it, NAME@REVISION. Only its config.json is
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
        values = _replaced(self.hf_config, NULL, None)
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
    made = _replaced(kept, None, NULL)
    assert isinstance(made, dict)
    return made


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """A value of JSON or TOML in which another one takes the place of one."""
    if isinstance(value, dict):
        return {key: _replaced(one, old, new) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(one, old, new) for one in value]
    return new if value == old else value


CODE_TYPE = "gristmill"
"""`model_type` of folders with the model's own code."""
CODE_CLASS = "GristmillForCausalLM"
CODE_MODULE = "modeling_gristmill"
_FILLED = ("bias", "qkv_bias", "norm_gain")
"""Without them, a model computes the same as one in which they are zero, or one."""
_OTHERWISE = 'train the class of transformers: model.hf with model.init = "pretrained"'
_OF_START = frozenset({"start", "init", "lora"})
"""Settings of a run that say where its weights came from and how they were trained, not what they
are: adapters are merged when weights are read."""
_MOST_LAYERS = 10_000
"""More is taken for a mistake in the file."""


def model_settings(folder: Path) -> dict[str, Any]:
    """The `[model]` table that fits the weights in a run folder or a Hugging Face folder."""
    run = folder / "run.toml"
    if run.is_file():
        try:
            model = tomllib.loads(run.read_text())["model"]
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise DataError(f"this is not the run file of a run: {error}", where=run) from error
        return {name: value for name, value in model.items() if name not in _OF_START}
    if not (folder / "config.json").is_file():
        what = f"'{folder}' holds neither a run (run.toml) nor a Hugging Face model (config.json)"
        raise DataError(what, where="model.start")
    return from_hf(read_json(folder / "config.json"), where=str(folder / "config.json"))


def model_type(values: Any, *, where: str) -> str:
    """The family of a `config.json`; refuses one whose models the native model cannot be."""
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or (kind != CODE_TYPE and kind not in FAMILIES):
        known = ", ".join(sorted(FAMILIES))
        what = f"the model is of type {kind!r}; the native model can be: {known}"
        raise DataError(what, where=where, remedy=_OTHERWISE)
    return kind


def from_hf(values: Any, *, where: str) -> dict[str, Any]:
    """Model settings from the content of a Hugging Face `config.json`."""
    kind = model_type(values, where=where)
    if kind == CODE_TYPE:
        names = (*GPTConfig.model_fields, *GPTConfig.retired)
        settings = {name: values[name] for name in names if name in values}
        wrong: list[str] = []
    else:
        settings, wrong = _read(values, FAMILIES[kind])
    if values.get("quantization_config"):
        wrong.append("quantization_config")
    if wrong:
        raise DataError(f"{', '.join(wrong)}: not supported", where=where, remedy=_OTHERWISE)
    try:
        model = GPTConfig.model_validate(settings)
    except ValidationError as error:
        theirs = {} if kind == CODE_TYPE else FAMILIES[kind].names
        raise DataError(_invalid(error, theirs, where=where)) from error
    if model.vocab is None:
        raise DataError("the size of the vocabulary is missing", where=where)
    uneven = (model.head_width is None and model.width % model.heads) or model.heads % model.groups
    if uneven or (model.positions == "rotary" and model.rotated % 2):
        sizes = f"width {model.width}, {model.heads} heads, {model.groups} key and value heads"
        what = f"no model has these sizes: {sizes}, {model.rotated} rotated features"
        raise DataError(what, where=where)
    return settings


def to_hf(model: GPTConfig, family: Family, *, vocab: int, end_of_text: int) -> dict[str, Any]:
    """The `config.json` of a family that can express the model."""
    theirs = {ours: name for name, ours in reversed(list(family.activations.items()))}
    values = {name: model.effective(ours) for ours, name in family.names.items()}
    values |= {name: values[other] for name, other in family.equal.items()}
    values[family.activation] = theirs.get(model.activation)
    if family.fixed.get("positions") == "rotary":
        # The names of transformers 4, and those of transformers 5.
        rope = {"rope_type": "default", "rope_theta": model.wavelength}
        values[family.rotary_base] = model.wavelength
        if family.rotary_fraction is not None:
            values[family.rotary_fraction] = rope["partial_rotary_factor"] = model.fraction
        values["rope_parameters"] = rope
    if family.windows:
        local = "global" if model.short_window is None else "local"
        pairs, single = divmod(model.layers, 2)
        values["attention_types"] = [[["global", local], pairs], [["global"], single]]
        values["window_size"] = model.window or model.context
    return {
        "architectures": [family.architecture],
        "model_type": family.type,
        **values,
        "vocab_size": vocab,
        **{
            name: model.attention_drop if name.startswith("att") else model.dropout
            for name in family.dropouts
        },
        **_ends(end_of_text),
    }


def to_hf_with_code(model: GPTConfig, *, vocab: int, end_of_text: int) -> dict[str, Any]:
    """The `config.json` of the model's own class. Settings that follow from others are written."""
    names = ("kv_heads", "head_width", "mlp_width", "qkv_bias")
    settings = model.model_dump(exclude_none=True, exclude={"start", "lora", "vocab_multiple"})
    return {
        "architectures": [CODE_CLASS],
        "model_type": CODE_TYPE,
        "auto_map": {
            "AutoConfig": f"{CODE_MODULE}.GristmillConfig",
            "AutoModelForCausalLM": f"{CODE_MODULE}.{CODE_CLASS}",
        },
        **settings,
        **{name: model.effective(name) for name in names},
        "vocab": vocab,
        "tie_word_embeddings": model.tie_head,
        **_ends(end_of_text),
    }


def choose_family(model: GPTConfig) -> Family:
    """The first family that can express a model; refuses one that none can."""
    nearest = min(WRITTEN, key=lambda family: len(differences(model, family)))
    if not (wrong := differences(model, nearest)):
        return nearest
    raise UserError(
        "no class of transformers can be this model: the nearest, "
        f"{nearest.architecture}, has no {', '.join(wrong)}",
        where="export",
        remedy="--code exports it with its own code, which transformers loads with "
        "trust_remote_code=True",
    )


# ------------------------------------------------------------------ one family


def _ends(end_of_text: int) -> dict[str, int]:
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def _read(values: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Model settings, and what we cannot express, as `name = value`."""
    values = {**family.defaults, **values}
    settings: dict[str, Any] = {
        ours: values[name] for ours, name in family.names.items() if values.get(name) is not None
    }
    settings |= family.fixed
    wrong = [name for name, known in family.only.items() if values.get(name, known) != known]
    wrong += [name for name, other in family.equal.items() if values[name] != values[other]]
    activation = family.activations.get(str(values.get(family.activation)))
    if activation is None:
        wrong.append(family.activation)
    else:
        settings["activation"] = activation
    window, context = values.get("sliding_window"), settings.get("context")
    slides = values.get("use_sliding_window") or "sliding_attention" in str(
        values.get("layer_types")
    )
    if slides and isinstance(window, int) and isinstance(context, int) and window < context:
        wrong.append("sliding_window")
    if family.windows:
        layers = _attention_layers(values.get("attention_types"))
        alternating = ["local" if layer % 2 else "global" for layer in range(len(layers))]
        known = layers == alternating or "local" not in layers
        if not known or len(layers) != settings.get("layers"):
            wrong.append("attention_types")
        elif "local" in layers:
            settings["window"] = values.get("window_size")
    shown = [_shown(name, values.get(name)) for name in wrong]
    if family.fixed.get("positions") == "rotary":
        rotary, unknown = _read_rotary(values, family)
        settings |= rotary
        shown += unknown
    return settings, shown


def _shown(name: str, value: Any) -> str:
    """A setting as the file has it."""
    return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"


def _attention_layers(types: Any) -> list[str]:
    """GPT-Neo's kind of attention in each layer; none if they cannot be read."""
    layers: list[str] = []
    try:
        for kinds, times in types:
            layers += [str(kind) for kind in kinds] * min(times, _MOST_LAYERS)
    except (TypeError, ValueError):
        return []
    return layers


def _read_rotary(values: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """The settings of rotary positions, from the names of transformers 4 or 5."""
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name) or {}
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):
        return {}, [_shown(name, rope)]
    base = rope.get("rope_theta", values.get(family.rotary_base))
    older = family.rotary_fraction or "partial_rotary_factor"
    fraction = rope.get("partial_rotary_factor", values.get(older))
    kind = rope.get("rope_type", rope.get("type", "default"))
    unknown = []
    if kind != "default":
        unknown.append(_shown(f"{name}.rope_type", kind))
    if family.rotary_fraction is None and fraction not in (None, 1):
        unknown.append(_shown("partial_rotary_factor", fraction))
    settings = {"rotary_base": base, "rotary_fraction": fraction}
    return {ours: value for ours, value in settings.items() if value is not None}, unknown


def differences(model: GPTConfig, family: Family) -> list[str]:
    """What a family cannot express of a model, as `name = value`."""
    written = to_hf(model, family, vocab=model.vocab or 1, end_of_text=0)
    settings, _ = _read(written, family)
    settings.setdefault("activation", next(iter(family.activations.values())))
    back, wrong = GPTConfig.model_validate(settings), []
    for name in (name for name in GPTConfig.model_fields if name not in GPTConfig.not_of_weights):
        ours, theirs = model.effective(name), back.effective(name)
        filled = name in _FILLED and theirs and not ours
        # Some classes demand this even of heads whose width is given.
        uneven = name == "heads" and family.heads_divide and model.width % model.heads
        if uneven or (ours != theirs and not filled):
            given = getattr(model, name)
            wrong.append(f"{name} = {ours if given is None else given!r}")
    return wrong


def _invalid(error: ValidationError, names: Mapping[str, str], *, where: str) -> list[Problem]:
    """Settings that are no settings, under their names in the config.json."""
    problems = []
    for details in error.errors():
        ours = ".".join(map(str, details["loc"]))
        name = names.get(ours, ours)
        if details["type"] == "missing":
            problems.append(Problem(f"there is no {name}", where))
        elif details["type"] == "extra_forbidden":
            what = f"{name} = {details['input']!r}: there is no such setting"
            problems.append(Problem(what, where))
        else:
            message = details["msg"][0].lower() + details["msg"][1:]
            problems.append(Problem(f"{name} = {details['input']!r}: {message}", where))
    return problems
