"""Factors: running averages of second moments, and the eigenbases and inverses made of them.

The k-th update of a factor F by a sample S is

    F <- d F + (1 - d) S        with d = min(decay, 1 - 1 / k)

so that the first samples are averaged evenly, and no memory of a start value remains. Everything is
in fp32. Whether an update counts is decided on the device, as for the steps of optimizers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch

FLOOR = 1e-30
"""The least mean eigenvalue, so that a layer without any gradient divides by something."""


class Eigen(NamedTuple):
    """A symmetric matrix as basis x diagonal x basis^T, eigenvalues in ascending order."""

    values: torch.Tensor
    basis: torch.Tensor


class SortedBasis(NamedTuple):
    """A basis, and which column of the one before it each of its columns follows."""

    basis: torch.Tensor
    order: torch.Tensor


def advance(
    factor: torch.Tensor,
    sample: torch.Tensor,
    *,
    decay: float | torch.Tensor,
    updates: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    """Update a factor in place; `updates` is how many it had before, `skip` is 1 to leave it."""
    memory = (updates / (updates + 1)).clamp(max=decay)
    factor.copy_(torch.where(skip > 0, factor, torch.lerp(sample, factor, memory)))


def mean_eigenvalue(factor: torch.Tensor) -> torch.Tensor:
    """The trace divided by the size."""
    return factor.diagonal().mean().clamp(min=FLOOR)


def decompose(factor: torch.Tensor) -> Eigen:
    """Eigenvalues, none of them negative, and eigenvectors."""
    scale = mean_eigenvalue(factor)
    values, basis = torch.linalg.eigh(factor / scale)
    return Eigen(values.clamp(min=0) * scale, basis)


def refresh_basis(factor: torch.Tensor, basis: torch.Tensor) -> SortedBasis:
    """A basis closer to the eigenvectors than the given one, by a step of orthogonal iteration, in
    descending order of eigenvalues. Far cheaper than a decomposition, and as good for a factor that
    changes slowly."""
    moved = factor @ basis
    order = (basis * moved).sum(dim=0).argsort(descending=True, stable=True)
    moved = moved[:, order]
    # Columns of comparable size: a QR decomposition does not change with their scale.
    moved = moved / torch.linalg.vector_norm(moved, dim=0).clamp(min=FLOOR)
    return SortedBasis(torch.linalg.qr(moved).Q, order)


def damped_inverse(factor: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """The inverse of a factor with damping added to its diagonal."""
    damped = factor.clone()
    damped.diagonal().add_(damping)
    lower, _ = torch.linalg.cholesky_ex(damped)
    return torch.cholesky_inverse(lower)


# ------------------------------------------------------------------ many at the same time
#
# A decomposition of a few thousand rows leaves most of a GPU idle and consists of many small
# kernels, which one thread cannot launch fast enough. Several threads with a stream each can.

THREADS = 8
"""144 QR decompositions of 768 and 3072 rows on an H200 take 826 ms one after the other, 217 ms in
8 threads, and 266 ms in 16."""

Task = Callable[[], None]


@torch.no_grad()
def side_by_side(tasks: Sequence[Task], device: torch.device) -> None:
    """Run tasks that do not depend on one another, the longest first. Each writes its results into
    tensors that exist already: others would belong to the thread's stream."""
    if device.type != "cuda" or len(tasks) < 2:
        for task in tasks:
            task()
        return
    main = torch.cuda.current_stream(device)
    _load_library(device)

    def run(task: Task) -> torch.cuda.Stream:
        stream = _own_stream(device)
        stream.wait_stream(main)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            task()
        return stream

    for stream in set(_threads().map(run, tasks)):
        main.wait_stream(stream)


@cache
def _load_library(device: torch.device) -> None:
    """torch loads its library of decompositions at their first use, which only one thread may
    make."""
    torch.linalg.cholesky(torch.eye(2, device=device))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="decompositions")


_local = threading.local()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of this thread."""
    if not hasattr(_local, "stream"):
        _local.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream: torch.cuda.Stream = _local.stream
    return stream
