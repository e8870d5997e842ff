"""Settings of models: what every kind of model has, and the native GPT.

A kind of model is a class here and a constructor in `models/build.py`. It declares its abilities
here, so that whatever it lacks is refused when the run file is read, before torch is loaded.

Models tell the rest of the program the roles of their parameters, and their abilities. An optimizer
treats each role in its own way without knowing the model. A feature that needs an ability refuses a
model without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gristmill.config.lora import LinearShape, LoraConfig
from gristmill.config.settings import Count, Fraction, Settings

GATE_FEATURES = 32
"""How many features of the residual stream decide a gate."""


class Role(StrEnum):
    """The part a parameter plays in a model."""

    EMBEDDING = "embedding"
    """Tables looked up at the input: tokens, positions. A tied head is the same parameter."""
    TABLE = "table"
    """Tables looked up by token further up, such as value embeddings."""
    HEAD = "head"
    """The output matrix, one row for each token."""
    MATRIX = "matrix"
    """Matrices inside blocks, through which every token goes."""
    VECTOR = "vector"
    """Biases, gains, gates and scalars."""


class Ability(StrEnum):
    """Something that not every model can do. The value completes "this setting needs ..."."""

    TENSOR = "tensor parallelism"
    CONTEXT = "context parallelism"
    PIPELINE = "pipeline stages"
    DOCUMENTS = "attention masks for packed documents"
    FP8 = "products in fp8"
    SAMPLED_SOFTMAX = "a sampled softmax"
    MTP = "a loss of the token after the next"


class ModelConfig(Settings):
    """What the rest of the program may ask of any model's settings."""

    kind: ClassVar[str] = "this"
    """What messages call a model of this kind."""
    abilities: ClassVar[frozenset[Ability]] = frozenset()
    marks: ClassVar[frozenset[str]] = frozenset()
    """Settings that only this kind has, and one of which tables of it always have; empty for the
    kind that a table is of if it has none of any other's."""
    not_of_weights: ClassVar[frozenset[str]] = frozenset({"start", "dropout", "lora"})
    """Settings that may differ between a run and the weights it starts from or resumes with."""
    retired: ClassVar[Mapping[str, Any]] = {}
    """Settings that no longer exist, with the value at which they did nothing: older files and
    checkpoints still name them."""

    if TYPE_CHECKING:
        # Every kind declares these itself, so that its table reads in an order of its own.
        context: int
        vocab: int | None
        vocab_multiple: int
        dropout: float
        start: str | None

    @model_validator(mode="before")
    @classmethod
    def _drop_retired(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        gone = cls.retired.items()
        return {key: value for key, value in values.items() if (key, value) not in gone}

    @property
    def roles(self) -> frozenset[Role]:
        """Roles that parameters of a model with these settings have."""
        return frozenset(Role)

    @property
    def initial_weights(self) -> str | None:
        """Where a new run's weights come from; None if they are random."""
        return self.start

    @property
    def drops(self) -> bool:
        """Whether training draws random numbers for dropout."""
        rates = (self.dropout, self.attention_drop)
        return any(rates) or (self.adapters is not None and self.adapters.dropout > 0)

    @property
    def attention_drop(self) -> float:
        """The rate of dropout on attention weights."""
        return self.dropout

    @property
    def adapters(self) -> LoraConfig | None:
        """The settings of its adapters, if it is to have some."""
        return getattr(self, "lora", None)

    @property
    def merged(self) -> Self:
        """The settings of the same model without adapters."""
        return self if self.adapters is None else self.model_copy(update={"lora": None})

    def effective(self, name: str) -> Any:
        """What a setting amounts to, where one that is not given follows from others."""
        return getattr(self, name)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Sizes that parallel.tp has to divide, by what messages call them."""
        return {}

    @property
    def attention_heads(self) -> int:
        """Heads that context parallelism may divide, of a model with that ability."""
        raise NotImplementedError

    @property
    def blocks(self) -> int:
        """Blocks that pipeline stages divide, of a model with that ability."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Settings that a resumed run must share with the run that wrote the checkpoint."""
        kept = self.model_dump(exclude_none=True, exclude=set(self.not_of_weights))
        return {**kept, **self.lora_identity()}

    def lora_identity(self) -> dict[str, Any]:
        """The part of `identity` that adapters have."""
        return {} if self.adapters is None else {"lora": self.adapters.identity()}

    @classmethod
    def identity_defaults(cls) -> dict[str, Any]:
        """What a setting meant to a checkpoint that does not name it."""
        fields = cls.model_fields.items()
        return {name: field.default for name, field in fields if not field.is_required()}


class GPTConfig(ModelConfig):
    """The native GPT. All defaults but the size are those of GPT-2 as published."""

    kind: ClassVar[str] = "GPT"
    abilities: ClassVar[frozenset[Ability]] = frozenset(Ability)
    not_of_weights: ClassVar[frozenset[str]] = ModelConfig.not_of_weights.union(
        ("vocab", "vocab_multiple", "attention_dropout"),
        ("init_std", "embedding_std", "head_std", "zero_init"),
    )
    retired: ClassVar[Mapping[str, Any]] = {"shortcut": False, "shifted_keys": 0}

    layers: Count
    """Number of transformer blocks."""
    heads: Count
    """Attention heads per block; must divide the width, unless head_width is given."""
    width: Count
    """Size of the residual stream."""
    context: Count
    """Longest sequence the model can attend to."""
    kv_heads: Count | None = None
    """Key and value heads, shared by groups of query heads; as many as heads if not given."""
    head_width: Count | None = None
    """Features of each head, as Qwen3 sets them; width / heads if not given."""
    mlp_width: Count | None = None
    """Inner size of the feed-forward part; 4 times the width if not given, for swiglu 8/3 times, in
    multiples of 64."""
    vocab: Count | None = None
    """Vocabulary size; taken from the token files' tokenizer if not given."""
    vocab_multiple: Count = 128
    """Pad the embedding to a multiple of this, for speed; padded ids are never predicted."""
    positions: Literal["learned", "rotary"] = "learned"
    """Position encoding: learned embeddings, or rotary ones (RoPE)."""
    rotary_base: Annotated[float, Field(gt=0)] | None = None
    """Base of the wavelengths of rotary positions (theta); 10000 if not given."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of each head's features, the first ones, that rotary positions rotate, as in
    GPT-NeoX; all if not given."""
    window: Count | None = None
    """Every other layer, from the second on, attends to this many last positions only, as in
    GPT-Neo; all layers attend to all positions if not given."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before attention, before the feed-forward part and before the head."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance in every normalisation."""
    qk_norm: bool = False
    """Normalise queries and keys per head (RMSNorm) before attention."""
    bias: bool = True
    """Biases in linear layers and LayerNorm."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values, where they differ from the others: Qwen2 has only these.
    As bias if not given."""
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu"] = "gelu_tanh"
    """Non-linearity of the feed-forward part; GPT-2 was trained with gelu_tanh."""
    norm_gain: bool = True
    """Learned gains (and biases) in normalisations."""
    parallel_residual: bool = False
    """Attention and feed-forward part of a block both read the input of the block, as in
    GPT-NeoX, instead of one after the other."""
    embedding_norm: bool = False
    """Normalise the residual stream before the first block too."""
    value_embeddings: Annotated[int, Field(ge=0)] = 0
    """How many layers, every other one from the last down, add a gated vector, looked up by token,
    to the values. Costs vocabulary x width parameters each, and almost no time."""
    attention_gate: bool = False
    """Multiply the output of each head by a factor from 0 to 2, computed from the input."""
    attention_scale: Annotated[float, Field(gt=0)] | None = None
    """Factor on query-key products; 1/sqrt(head width) if not given."""
    logit_cap: Annotated[float, Field(gt=0)] | None = None
    """Logits z become cap tanh(z / cap), so that none is larger; none if not given."""
    tie_head: bool = True
    """Share the token embedding with the output head."""
    dropout: Fraction = 0.0
    """Dropout on embeddings, attention weights and residual branches."""
    attention_dropout: Fraction | None = None
    """Dropout on attention weights, where it differs; as dropout if not given."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; for residual projections over sqrt(2 layers)."""
    embedding_std: Annotated[float, Field(gt=0)] | None = None
    """The same for the token embedding; init_std if not given."""
    head_std: Annotated[float, Field(gt=0)] | None = None
    """The same for a head that is not tied; init_std if not given."""
    zero_init: bool = False
    """Projections onto the residual stream start at zero, so every block begins as the identity."""
    start: str | None = None
    """Start from these weights instead of random ones: a run folder, a Hugging Face folder, or a
    name there such as "gpt2". Its sizes are taken over; sizes given here too must agree with it."""
    lora: LoraConfig | None = None
    """Train adapters of the weights in `start` instead of the weights; all weights if not given."""

    @property
    def roles(self) -> frozenset[Role]:
        has = {
            Role.EMBEDDING: True,
            Role.MATRIX: True,
            Role.TABLE: self.value_embeddings > 0,
            Role.HEAD: not self.tie_head,
            Role.VECTOR: self.bias
            or self.has_qkv_bias
            or self.norm_gain
            or self.value_embeddings > 0
            or self.attention_gate,
        }
        return frozenset(role for role, yes in has.items() if yes)

    def effective(self, name: str) -> Any:
        return getattr(self, _FOLLOWING.get(name, name))

    def tensor_parallel_sizes(self) -> dict[str, int]:
        sizes = {f"the heads {self.heads}": self.heads}
        if self.groups != self.heads:
            sizes[f"the key and value heads {self.groups}"] = self.groups
        return {**sizes, f"the inner width {self.inner}": self.inner}

    @property
    def attention_heads(self) -> int:
        return self.heads

    @property
    def blocks(self) -> int:
        return self.layers

    @property
    def head_size(self) -> int:
        """Features of each head."""
        return self.head_width or self.width // self.heads

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def attention_drop(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def wavelength(self) -> float:
        """The base of rotary positions."""
        return self.rotary_base or 10_000.0

    @property
    def fraction(self) -> float:
        """Fraction of each head's features that rotary positions rotate."""
        return self.rotary_fraction or 1.0

    @property
    def rotated(self) -> int:
        """Features of each head that rotary positions rotate."""
        return int(self.head_size * self.fraction)

    @property
    def short_window(self) -> int | None:
        """The window of every other layer, if it is shorter than the context."""
        return self.window if self.window is not None and self.window < self.context else None

    @property
    def own_scale(self) -> float | None:
        """The factor on query-key products, if it is not the usual one."""
        usual = self.attention_scale == self.head_size**-0.5
        return None if usual else self.attention_scale

    @property
    def value_layers(self) -> tuple[int, ...]:
        """Layers with value embeddings."""
        return tuple(range(self.layers - 1, -1, -2)[: self.value_embeddings])

    def linears(self) -> dict[str, LinearShape]:
        """The linear layers of blocks, by name."""
        query, key = (heads * self.head_size for heads in (self.heads, self.groups))
        gates = 2 if self.activation == "swiglu" else 1
        in_block = {
            "attention.qkv": LinearShape(self.width, (query, key, key), self.has_qkv_bias),
            "attention.out": LinearShape(query, (self.width,), self.bias),
            "mlp.up": LinearShape(self.width, (self.inner,) * gates, self.bias),
            "mlp.down": LinearShape(self.inner, (self.width,), self.bias),
        }
        return {
            f"blocks.{layer}.{name}": shape
            for layer in range(self.layers)
            for name, shape in in_block.items()
        }

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        if self.mlp_width:
            return self.mlp_width
        if self.activation == "swiglu":
            return -(-8 * self.width // 3 // 64) * 64
        return 4 * self.width


_FOLLOWING = {
    "kv_heads": "groups",
    "head_width": "head_size",
    "mlp_width": "inner",
    "qkv_bias": "has_qkv_bias",
    "rotary_base": "wavelength",
    "rotary_fraction": "fraction",
    "window": "short_window",
    "attention_scale": "own_scale",
}
"""Settings that follow from others if they are not given, with the property that says so."""
