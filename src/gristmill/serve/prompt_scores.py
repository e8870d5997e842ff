"""The log-probabilities of a prompt: how likely each of its tokens was after those before it.

A prompt is computed in chunks, with the model's cache, so that the logits that are in memory at any
time are those of one chunk. A model without a cache computes all positions again for each chunk.

Shapes: T positions, N positions of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gristmill.generate.request import TokenProbability
from gristmill.models.decoding import computing_in
from gristmill.models.spec import CausalLM

LOGIT_BYTES = 2**28
"""Memory for the fp32 logits of a chunk."""


def prompt_probabilities(
    model: CausalLM, ids: Sequence[int], *, likeliest: int, known: int, dtype: torch.dtype
) -> Iterator[list[TokenProbability]]:
    """Yield those of a chunk of tokens at a time, from the second token on. `known` ids can be
    drawn."""
    cache = model.new_cache(len(ids)) if len(ids) > 1 else None
    chunk = max(1, LOGIT_BYTES // (4 * known))
    ids_T = torch.tensor(list(ids), device=model.device)
    for begin in range(0, len(ids) - 1, chunk):
        end = min(begin + chunk, len(ids) - 1)
        first = 0 if cache is None else begin
        at_N = torch.arange(begin - first, end - first, device=model.device)
        # Not around the yield: something else may be computed between two chunks.
        with torch.inference_mode(), computing_in(model, dtype):
            was_training = model.training
            model.eval()
            logits_NV = model(ids_T[None, first:end], cache=cache, logits_at_N=at_N)
            model.train(was_training)
            next_N = ids_T[begin + 1 : end + 1]
            scores = _of_chunk(logits_NV[:, :known].float(), next_N, likeliest)
        yield scores


def _of_chunk(
    logits_NV: torch.Tensor, next_N: torch.Tensor, likeliest: int
) -> list[TokenProbability]:
    log_probs_NV = logits_NV.log_softmax(1)
    # An id that cannot be drawn may be in a prompt.
    inside_N = next_N.clamp(max=logits_NV.shape[1] - 1)
    own_N = log_probs_NV.gather(1, inside_N[:, None])[:, 0]
    own_N = own_N.masked_fill(next_N != inside_N, -torch.inf)
    values, ids = log_probs_NV.topk(min(likeliest, logits_NV.shape[1]), dim=1)
    return [
        TokenProbability(id, log_prob, tuple(zip(of_ids, of_values, strict=True)))
        for id, log_prob, of_ids, of_values in zip(
            next_N.tolist(), own_N.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]
