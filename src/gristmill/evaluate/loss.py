"""Loss, perplexity and bits per byte of a model on text.

The text is read in windows of the model's context that do not overlap, the last one shorter; every
token but the first of each window is predicted. Bits per byte divide by the bytes of the predicted
tokens, so that models with different tokenizers can be compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import LoadedModel
from gristmill.models.spec import Loss


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    loss: float
    """Mean over predicted tokens, in nats."""
    perplexity: float
    bits_per_byte: float
    tokens: int
    """Tokens predicted."""
    seconds: float


def evaluate_loss(
    loaded: LoadedModel,
    ids: np.ndarray,
    *,
    batch: int = 8,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate on a sequence of token ids, on its first `limit` tokens if given."""
    ids = ids if limit is None else ids[: limit + 1]
    if len(ids) < 2:
        raise UserError("the text has fewer than two tokens", where="evaluate", exit=Exit.DATA)
    started = time.monotonic()
    bytes_of = np.array(
        [len(loaded.tokenizer.token_bytes(i)) for i in range(loaded.tokenizer.size)]
    )
    device = loaded.model.embedding.weight.device
    total, tokens, text_bytes = 0.0, 0, 0
    for windows_BS in _windows(ids, context=loaded.model.config.context, batch=batch):
        window = torch.from_numpy(windows_BS).to(device)
        with torch.inference_mode():
            loss = loaded.model(window[:, :-1], targets_BT=window[:, 1:].contiguous())
        assert isinstance(loss, Loss)
        total += loss.total.item()
        tokens += windows_BS[:, 1:].size
        text_bytes += int(bytes_of[windows_BS[:, 1:]].sum())
        if progress is not None:
            progress(tokens, len(ids) - 1)
    mean = total / tokens
    return Evaluation(
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        bits_per_byte=total / math.log(2) / max(1, text_bytes),
        tokens=tokens,
        seconds=time.monotonic() - started,
    )


def _windows(ids: np.ndarray, *, context: int, batch: int) -> Iterator[np.ndarray]:
    """Windows of context + 1 tokens that share one token with the next, then the rest."""
    whole = (len(ids) - 1) // context
    for first in range(0, whole, batch):
        rows = range(first, min(first + batch, whole))
        yield np.stack([ids[r * context : (r + 1) * context + 1] for r in rows]).astype(np.int64)
    if whole * context + 1 < len(ids):
        yield np.array(ids[whole * context :], dtype=np.int64)[None]
