"""The functions that tables name, for options that mean something only together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gristmill.dialects import (
    decentralized_rules,
    llm_pytorch_rules,
    megatron_data_rules,
    megatron_rules,
    nanogpt_rules,
    xla_gpt2_rules,
)
from gristmill.dialects.draft import TranslationDraft

RULES: Mapping[str, Callable[[TranslationDraft], None]] = {
    f"{system}.{rule.__name__}": rule
    for system, rules in {
        "megatron": (*megatron_rules.RULES, *megatron_data_rules.RULES),
        "nanogpt": nanogpt_rules.RULES,
        "llm-pytorch": llm_pytorch_rules.RULES,
        "decentralized": decentralized_rules.RULES,
        "xla-gpt2": xla_gpt2_rules.RULES,
    }.items()
    for rule in rules
}
