"""Cross-entropy of the next token without materialising the logits of all tokens.

For N tokens, hidden states h, head W and loss weights w, the loss is the sum

    sum_n  w_n (logsumexp(z_n) - z_n[target_n])      z_n = W h_n (+ b), or cap tanh(that / cap)

computed over slices of tokens. Gradients are computed in the same pass, slice by slice, overwriting
the logits: dW and dh are kept, and the work is the usual three matrix products; two of them if the
head is frozen, which has no dW. The price: the scale of the loss must be known in the forward pass.
This also scales fp16 gradients before they are rounded.

`LossTerms` (`loss_terms.py`) say what the loss is, and reach every layer here as they are:

    linear_cross_entropy   what each token predicts: sampled rows, second targets
    _LinearCrossEntropy    autograd: the gradients were computed in the forward pass
    _sliced                to the compiler one opaque operator; a head for each slice
    _over_slices           the sums of losses and gradients
    head.losses            the arithmetic: plain operations, or the kernel in `kernels/`

The Triton kernel keeps logits in the dtype of the hidden states and overwrites them with their
gradient, computed in fp32; without it plain operations on fp32 logits do the same. In training the
products may be in fp8 (`Fp8Head`), slices may be compared with only some of the head's
rows, and tokens may have a second target (`loss_terms.py`); in evaluation never.

The head's rows may be sharded over processes. Each computes its part of the logits, and they
exchange only three numbers per token: maximum, sum of exponentials, and the target's logit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Union, get_type_hints

import torch
from torch.nn import functional

from gristmill.models.loss_terms import (
    PLAIN_LOSS,
    LossTerms,
    TokenTargets,
    mtp_targets,
    sample_rows,
)
from gristmill.models.products import product
from gristmill.models.spec import Loss, ShardComm

if TYPE_CHECKING:
    from gristmill.models.kernels.cross_entropy import Fp8Head

_Head = Union["_PlainHead", "Fp8Head"]
"""A head in some format, which computes the losses of slices of tokens."""

SLICE_BYTES = 2**31
"""Memory allowed for one slice's logits on a GPU."""
CPU_SLICE_BYTES = 16 * 2**20
"""The same on the CPU, where a slice should stay in the cache."""
SLICE_TOKENS, CPU_SLICE_TOKENS = 64, 256
"""Minimum tokens per slice, on a GPU and on the CPU: products with fewer rows are slow."""


class HeadOptions(NamedTuple):
    """How the loss is computed from hidden states."""

    vocab: int
    """Ids that can be predicted; rows of the head from here on are padding."""
    kernel: bool
    """Use Triton."""
    fp8: bool
    """Matrix products in fp8 (also Triton), in training."""
    wants_gradient: bool
    trains_head: bool


def linear_cross_entropy(
    hidden: torch.Tensor,
    head_VD: torch.Tensor,
    targets: torch.Tensor,
    terms: LossTerms = PLAIN_LOSS,
    *,
    vocab: int,
    bias_V: torch.Tensor | None = None,
    kernel: bool = False,
    fp8: bool = False,
    comm: ShardComm | None = None,
    first: int = 0,
) -> Loss:
    """Loss summed over tokens, of hidden states (B, T, D) and targets (B, T), or of a sequence
    alone. Rows of the head from `vocab` on are padding and are never predicted. `kernel`: use
    Triton. `fp8`: matrix products in fp8 (also Triton) in training.
    `comm`, `first`: for a head with sharded rows, which plain operations compute; `first` is the
    index of the first row here."""
    wants_gradient = torch.is_grad_enabled()
    options = HeadOptions(
        vocab, kernel, fp8, wants_gradient, wants_gradient and head_VD.requires_grad
    )
    shard = None if comm is None or comm.single else _VocabularyShard(comm, first)
    if not terms.by_sample:
        return _batch_loss(hidden, head_VD, bias_V, targets, terms, options, shard)
    samples = [slice(n, n + 1) for n in range(len(targets))]
    losses = [
        _batch_loss(hidden[n], head_VD, bias_V, targets[n], terms.of_samples(n), options, shard)
        for n in samples
    ]
    return Loss(*map(torch.stack, zip(*losses, strict=True)))


class _VocabularyShard(NamedTuple):
    """Which rows of the head are here."""

    comm: ShardComm = ShardComm()
    first: int = 0


_ALL_ROWS = _VocabularyShard()


def _batch_loss(
    hidden: torch.Tensor,
    head_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets: torch.Tensor,
    terms: LossTerms,
    options: HeadOptions,
    shard: _VocabularyShard | None,
) -> Loss:
    """The loss of all tokens, and what each of them predicts."""
    if terms.scale is None:
        terms = terms._replace(scale=torch.ones((), device=hidden.device))
    if terms.loss_weights_BT is not None:
        terms = terms._replace(loss_weights_BT=terms.loss_weights_BT.flatten())
    if terms.sources_B is not None:
        sources_BT = terms.sources_B[:, None].expand(-1, targets.shape[-1])
        terms = terms._replace(sources_B=sources_BT.flatten())
    tokens = TokenTargets(targets.flatten())
    borders = [targets.shape[-1]]
    if options.wants_gradient:
        if terms.sampled is not None and terms.sampled < options.vocab and shard is None:
            tokens = sample_rows(tokens.targets_N, vocab=options.vocab, rows=terms.sampled)
            borders.append(terms.sampled)  # targets are places among the rows of their own slice
        if terms.mtp_scale is not None:
            tokens = mtp_targets(tokens, terms, borders=borders)
    scaled, total = _LinearCrossEntropy.apply(
        *(hidden.flatten(0, -2), head_VD, bias_V, shard),
        *(*tokens, *options, *terms),
    )
    return Loss(scaled, total)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Soft-capped logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


# ------------------------------------------------------------------ sums over slices


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        head_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        shard: _VocabularyShard | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, options, terms = unpacked(rest)
        assert terms.scale is not None
        if shard is None:
            compute = _sliced_op if _is_traced(hidden_ND) else _sliced
            total, *gradients = compute(hidden_ND, head_VD, bias_V, *rest)
        else:
            half = head_VD.to(hidden_ND.dtype)
            head = _PlainHead(half, None, terms, options.vocab, shard=shard)
            step = slice_length(half.shape[0], width=4, device=half.device)
            pieces = zip(_slices(0, hidden_ND.shape[0], step), repeat(head), strict=False)
            total, *gradients = _over_slices(
                pieces, hidden_ND, head_VD, bias_V, tokens, options, terms
            )
        trains = options.trains_head
        ctx.trains_head, ctx.trains_bias = trains, trains and bias_V is not None
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(total)
        return (total[0] if terms.sources else total) * terms.scale, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outer, arguments = gradients[0], len(ctx.needs_input_grad)
        d_hidden, d_head, d_bias = ctx.saved_tensors
        wanted = (
            d_hidden * outer.to(d_hidden.dtype),
            d_head * outer.to(d_head.dtype) if ctx.trains_head else None,
            d_bias * outer.to(d_bias.dtype) if ctx.trains_bias else None,
        )
        return (*wanted, *(None,) * (arguments - len(wanted)))


def unpacked(rest: Any) -> tuple[TokenTargets, HeadOptions, LossTerms]:
    """The records whose fields are the arguments of the operation after the bias."""
    first, second = len(TokenTargets._fields), len(TokenTargets._fields + HeadOptions._fields)
    return TokenTargets(*rest[:first]), HeadOptions(*rest[first:second]), LossTerms(*rest[second:])


def _is_traced(x: torch.Tensor) -> bool:
    """Whether a graph is made, where the loss is one operation. It need not be one elsewhere: at
    the first call of an operation that is not its own torch imports its compiler, for seconds."""
    return torch.compiler.is_compiling() or type(x) is not torch.Tensor


def _sliced(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, bias_V: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss and the scaled gradients of hidden states, head and bias; those that are not
    wanted are empty."""
    tokens, options, terms = unpacked(rest)
    dtype, rows_SR, log_weights_SR = hidden_ND.dtype, tokens.rows_SR, tokens.log_weights_SR
    count, width = hidden_ND.shape[0], dtype.itemsize if options.kernel or options.fp8 else 4

    def build(head_VD: torch.Tensor, bias_V: torch.Tensor | None, vocab: int) -> _Head:
        if options.fp8 and options.wants_gradient:
            from gristmill.models.kernels.cross_entropy import Fp8Head

            assert dtype is torch.bfloat16 and bias_V is None, "checked with the settings"
            return Fp8Head(head_VD, terms, vocab=vocab)
        return _PlainHead(*_aligned(head_VD, bias_V, dtype), terms, vocab, kernel=options.kernel)

    def pieces() -> Iterator[tuple[slice, _Head]]:
        rows = head_VD.shape[0] if rows_SR is None else rows_SR.shape[1]
        step = slice_length(rows, width=width, device=hidden_ND.device)
        if rows_SR is None or log_weights_SR is None:
            head = build(head_VD, bias_V, options.vocab)
            yield from ((part, head) for part in _slices(0, count, step))
            return
        # A slice of sampled rows has as many tokens as rows, and may be cut further for memory.
        for number, (rows_R, log_weights_R) in enumerate(zip(rows_SR, log_weights_SR, strict=True)):
            head = build(head_VD[rows_R], None if bias_V is None else bias_V[rows_R], rows)
            head = head.sampled(rows_R, log_weights_R)
            begin, end = number * rows, min(count, (number + 1) * rows)
            yield from ((part, head) for part in _slices(begin, end, step))

    return _over_slices(pieces(), hidden_ND, head_VD, bias_V, tokens, options, terms)


def slice_length(rows: int, *, width: int, device: torch.device) -> int:
    """Tokens per slice, such that its logits of `width` bytes each fit into SLICE_BYTES."""
    cpu = device.type == "cpu"
    allowance = CPU_SLICE_BYTES if cpu else SLICE_BYTES
    least = CPU_SLICE_TOKENS if cpu else SLICE_TOKENS
    return max(least, allowance // (width * rows) // 64 * 64)


def _slices(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(end, start + step)) for start in range(begin, end, step))


ROW_MULTIPLE = 64
"""Matrix products on a GPU are several times slower if the head's rows are not a multiple of some
small power of two."""


def _aligned(
    head_VD: torch.Tensor, bias_V: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The head and its bias in another dtype, with rows of padding on a GPU."""
    rows = head_VD.shape[0]
    missing = -rows % ROW_MULTIPLE if head_VD.is_cuda else 0
    if not missing:
        return head_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
    padded_VD = head_VD.new_zeros((rows + missing, head_VD.shape[1]), dtype=dtype)
    padded_VD[:rows] = head_VD
    return padded_VD, None if bias_V is None else functional.pad(bias_V.to(dtype), (0, missing))


def _over_slices(
    pieces: Iterable[tuple[slice, _Head]],
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    tokens: TokenTargets,
    options: HeadOptions,
    terms: LossTerms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, given the slices of tokens and a head for each."""
    device, wants_gradient, trains_head = hidden_ND.device, *options[-2:]
    total = torch.zeros(terms.totals, dtype=torch.float32, device=device)
    d_hidden = torch.empty_like(hidden_ND) if wants_gradient else hidden_ND.new_empty(0)
    # Accumulated over slices in fp32, whatever the head's dtype; with room for rows of padding.
    rows = head_VD.shape[0]
    shape = (rows + ROW_MULTIPLE, head_VD.shape[1]) if trains_head else (0,)
    d_head = torch.zeros(shape, dtype=torch.float32, device=device)
    d_bias = torch.zeros(0 if bias_V is None else shape[0], dtype=torch.float32, device=device)
    assert terms.scale is not None
    scale, weights_N = terms.scale.float(), terms.loss_weights_BT
    for part, head in pieces:
        hidden, targets = hidden_ND[part], tokens.part(part)
        ones = torch.ones_like(targets.targets_N, dtype=torch.float32)
        weights = ones if weights_N is None else weights_N[part].float()
        if wants_gradient:
            losses, d_logits = head.losses(hidden, targets, scale * weights, d_hidden[part])
            # As large as the logits, whose memory it may be: every product that needs it comes now,
            # so that only one such tensor exists at a time.
            if trains_head:
                _add_gradient(d_head, d_logits.T, hidden, head)
            if trains_head and bias_V is not None:
                d_bias[head.places] += d_logits.sum(dim=0, dtype=torch.float32)
            del d_logits  # frees the memory for the next slice
        else:
            losses, _ = head.losses(hidden, targets, None, None)
        total += sums_of(losses * weights, terms, part)
    return total, d_hidden, d_head[:rows].to(head_VD.dtype), d_bias[:rows].to(head_VD.dtype)


def sums_of(losses_N: torch.Tensor, terms: LossTerms, part: slice = slice(None)) -> torch.Tensor:
    """The sum of some tokens' losses, and if the terms ask for it that of each source's."""
    if terms.sources_B is None:
        return losses_N.sum()
    numbers_S1 = torch.arange(terms.sources, device=losses_N.device)[:, None]
    of_source_SN = terms.sources_B[part] == numbers_S1
    sums_S = torch.where(of_source_SN, losses_N, 0.0).sum(dim=1)
    return torch.cat([losses_N.sum()[None], sums_S])


def _add_gradient(
    d_head_VD: torch.Tensor, d_logits_RN: torch.Tensor, hidden_ND: torch.Tensor, head: _Head
) -> None:
    """Add the gradient of a slice to that of the whole head, which is fp32."""
    places = head.places
    if isinstance(places, torch.Tensor):
        # Sampled rows are distinct within a slice, so that no two sums meet in one row.
        d_head_VD.index_add_(0, places, product(d_logits_RN, hidden_ND, d_head_VD.dtype))
    elif d_logits_RN.dtype == d_head_VD.dtype:
        d_head_VD[places].addmm_(d_logits_RN, hidden_ND)
    elif d_logits_RN.is_cuda:
        sums_VD = d_head_VD[places]
        torch.addmm(sums_VD, d_logits_RN, hidden_ND, out_dtype=sums_VD.dtype, out=sums_VD)
    else:
        d_head_VD[places] += d_logits_RN @ hidden_ND


_TYPES = {torch.Tensor: "Tensor", int: "int", float: "float", bool: "bool"}


def _schema() -> str:
    """The arguments of the operation: those of `_sliced`, with the fields of the records. So a
    field that is added to a record is an argument of the operation."""
    types = {kind | None: f"{name}?" for kind, name in _TYPES.items()} | _TYPES
    fields = {
        "hidden": torch.Tensor,
        "head": torch.Tensor,
        "bias": torch.Tensor | None,
        **get_type_hints(TokenTargets),
        **get_type_hints(HeadOptions),
        **get_type_hints(LossTerms),
    }
    arguments = ", ".join(f"{types[kind]} {name}" for name, kind in fields.items())
    return f"({arguments}) -> (Tensor, Tensor, Tensor, Tensor)"


_sliced_op = torch.library.custom_op(
    "gristmill::linear_cross_entropy", _sliced, mutates_args=(), schema=_schema()
)


@_sliced_op.register_fake
def _(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, bias_V: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _, options, terms = unpacked(rest)
    total = hidden_ND.new_empty(terms.totals, dtype=torch.float32)
    none = head_VD.new_empty(0)
    d_hidden = torch.empty_like(hidden_ND) if options.wants_gradient else hidden_ND.new_empty(0)
    if not options.trains_head:
        return total, d_hidden, none, head_VD.new_empty(0)
    d_bias = none if bias_V is None else torch.empty_like(bias_V, dtype=head_VD.dtype)
    return total, d_hidden, torch.empty_like(head_VD), d_bias


# ------------------------------------------------------------------ the loss of a slice


@dataclass(frozen=True)
class _PlainHead:
    """The head, or a shard of its rows, in the dtype of the hidden states. The head in fp8
    (`kernels/cross_entropy.py`) has the same methods."""

    head_VD: torch.Tensor
    bias_V: torch.Tensor | None
    terms: LossTerms
    vocab: int
    kernel: bool = False
    shard: _VocabularyShard = _ALL_ROWS
    rows_R: torch.Tensor | None = None
    log_weights_R: torch.Tensor | None = None

    @property
    def places(self) -> slice | torch.Tensor:
        """Which rows of the whole head these are, those of padding included."""
        return slice(self.head_VD.shape[0]) if self.rows_R is None else self.rows_R

    def sampled(self, rows_R: torch.Tensor, log_weights_R: torch.Tensor) -> Self:
        """The same head, whose rows are these ones of the whole, with weights."""
        return replace(self, rows_R=rows_R, log_weights_R=log_weights_R)

    def losses(
        self,
        hidden_ND: torch.Tensor,
        tokens: TokenTargets,
        factors_N: torch.Tensor | None,
        d_hidden_ND: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a slice and, if tokens have factors, the gradient of its logits, to which
        second targets add; the gradient of its hidden states is written to `d_hidden_ND` if
        given."""
        rows_DV = self.head_VD.T
        if self.bias_V is None:
            logits_NV = hidden_ND @ rows_DV
        else:
            logits_NV = torch.addmm(self.bias_V, hidden_ND, rows_DV)
        if self.kernel:
            from gristmill.models.kernels.cross_entropy import cross_entropy_

            losses_N = cross_entropy_(
                *(logits_NV, tokens, factors_N, self.terms),
                vocab=self.vocab,
                log_weights_V=self.log_weights_R,
            )
        else:
            losses_N, logits_NV = self._plain_losses(logits_NV, tokens, factors_N)
        if d_hidden_ND is not None:
            torch.mm(logits_NV, self.head_VD, out=d_hidden_ND)
        return losses_N, logits_NV

    def _plain_losses(
        self, logits_NV: torch.Tensor, tokens: TokenTargets, factors_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of one slice; where factors are given, the gradient overwrites the logits."""
        (comm, first), columns = self.shard, logits_NV.shape[1]
        vocab, cap = self.vocab, self.terms.cap
        dtype, logits_NV = logits_NV.dtype, logits_NV.float()
        slope_NV = None
        if cap is not None:
            # tanh x = 2 sigmoid(2 x) - 1, which is twice as fast on a CPU.
            logits_NV = logits_NV.mul_(2 / cap).sigmoid_().mul_(2).sub_(1)
            slope_NV = 1 - logits_NV.square() if factors_N is not None else None
            logits_NV.mul_(cap)
        if vocab < first + columns:
            logits_NV[:, max(0, vocab - first) :] = -torch.inf
        if self.log_weights_R is not None:
            # After the cap: the weights belong to the sum, not to the logits. Targets have weight
            # 1, so what is picked below is the plain logit all the same.
            logits_NV += self.log_weights_R
        target_N1, here_N1 = self._columns(tokens.targets_N, columns)
        # Each target is on one shard, and zero on the others; their sum is its logit everywhere.
        picked_N1 = comm.all_sum(torch.where(here_N1, logits_NV.gather(1, target_N1), 0.0))
        largest_N1 = comm.all_max(logits_NV.amax(dim=-1, keepdim=True))
        sums_N1 = comm.all_sum(logits_NV.sub_(largest_N1).exp_().sum(dim=-1, keepdim=True))
        losses_N = (sums_N1.log() + largest_N1 - picked_N1)[:, 0]
        if factors_N is not None:
            # From here on the tensor holds exp(z - max) and becomes the gradient: probabilities
            # times the factors of all targets, less each factor in the column of its target.
            factors_N1, more_N = factors_N[:, None], tokens.mtp_factors_N
            more_N1 = None if more_N is None else more_N[:, None]
            logits_NV.mul_((factors_N1 if more_N1 is None else factors_N1 + more_N1) / sums_N1)
            logits_NV.scatter_add_(1, target_N1, torch.where(here_N1, -factors_N1, 0.0))
            if more_N1 is not None and tokens.mtp_targets_N is not None:
                target_N1, here_N1 = self._columns(tokens.mtp_targets_N, columns)
                logits_NV.scatter_add_(1, target_N1, torch.where(here_N1, -more_N1, 0.0))
            if slope_NV is not None:
                # Last, since the targets' terms go through the cap as well.
                logits_NV.mul_(slope_NV)
        return losses_N, logits_NV.to(dtype)

    def _columns(self, targets_N: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of targets among the rows here, and which of them are here."""
        target_N1 = targets_N[:, None] - self.shard.first
        here_N1 = (target_N1 >= 0) & (target_N1 < columns)
        return target_N1.clamp(0, columns - 1), here_N1
