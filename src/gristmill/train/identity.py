"""The identity of a run: the settings and data that must stay the same for it to resume exactly.

It is saved with every checkpoint. A resume that finds another value is refused and names the key;
everything that is not in it may change, such as the horizon, the intervals and the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gristmill.config.optim import PreconditionerConfig
from gristmill.config.resolve import Resolved
from gristmill.config.schema import RunConfig
from gristmill.data.build import order_identity
from gristmill.data.dataset import (
    DatasetSplit,
    RunData,
)
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.train.order import order_spec


def _preconditioner_identity(settings: PreconditionerConfig | None) -> dict[str, Any]:
    """The settings that determine the state of a preconditioner."""
    names = ("type", "method", "sides")
    values = {name: getattr(settings, name, None) for name in names}
    return {f"optim.preconditioner.{n}": value for n, value in values.items() if value is not None}


def run_identity(
    config: RunConfig,
    resolved: Resolved,
    data: RunData,
    tokenizer: Tokenizer,
    chat: ChatEncoder | None,
) -> dict[str, Any]:
    """The settings and facts about the data that must stay the same, by name."""
    cut: dict[str, Any] = {
        "data.split (tokens)": _of_each_set(
            data, lambda split: [split.tokens.start, split.tokens.stop]
        )
    }
    if chat is not None:
        cut = {
            "data.split (conversations)": _of_each_set(data, lambda split: split.documents),
            "data.template (content)": chat.template.fingerprint,
        }
    data_seed = {} if config.data.seed is None else {"data.seed": config.data.seed}
    return {
        **model_settings(config.model.identity()),
        "model.vocab": resolved.vocab,
        "tokenizer": tokenizer.fingerprint,
        "data.paths (content)": _of_each_set(data, lambda split: split.reader.info.fingerprint),
        **cut,
        "data.order": config.data.order,
        "data.sequence": resolved.sequence,
        **data_seed,
        **order_identity(config.data, data.train, order_spec(config.data, resolved)),
        "train.seed": config.train.seed,
        "optim.type": config.optim.type,
        **_preconditioner_identity(config.optim.preconditioning),
    }


def model_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a model, by their names in the run file."""
    return {f"model.{name}": value for name, value in settings.items()}


def _of_each_set(data: RunData, fact: Callable[[DatasetSplit], Any]) -> Any:
    """A fact about each training set; a single set's fact is not wrapped in a list."""
    facts = [fact(split) for split in data.train.splits]
    return facts[0] if len(facts) == 1 else facts
