"""Tensors that go through host memory: every collective gives what gloo gives, on three and four
processes. There is no GPU here, so tensors on the host are taken for those of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_cases import (
    LAYOUTS,
    MORE,
    Crowd,
    Curve,
    both,
    model_for,
    parallel_words,
    run,
)
from torch.distributed import _functional_collectives as functional

from gristmill.distributed.staged import StagedGroup, register_staged

gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
gather_traced = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
scatter_traced = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)


def change_over(folder: str, *, everything: bool = True) -> None:
    """From the group of the crowd to one whose tensors go through host memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    register_staged()
    if everything:
        StagedGroup.goes_through_host = lambda self, tensor: True  # type: ignore[method-assign]
    store, limit = dist.FileStore(f"{folder}/staged", size), timedelta(seconds=60)
    dist.init_process_group("staged", store=store, rank=rank, world_size=size, timeout=limit)
    assert isinstance(dist.group.WORLD, StagedGroup)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other numbers on every process, whose sums round."""
    random = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(*shape, generator=random).to(dtype)


def all_collectives(*, copied: bool) -> dict[str, list[Any]]:
    """What each collective gives on this process, in a group of all and in a group of some."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, list[Any]] = {}
    some = dist.new_group([0, 2], use_local_synchronization=True) if rank in (0, 2) else None
    groups = {"all": dist.group.WORLD} | ({} if some is None else {"some": some})
    for where, group in groups.items():
        assert group is not None
        count, place = group.size(), group.rank()

        def note(name: str, *tensors: torch.Tensor, where: str = where) -> None:
            found[f"{name}, {where}"] = [tensor.tolist() for tensor in tensors]

        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = numbers(1001, dtype=dtype)
            dist.all_reduce(x, group=group)
            note(f"all_reduce of {dtype}", x)
        x = numbers(3, 5).t()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        note("all_reduce of a transposed tensor", x)
        works = [dist.all_reduce(x := numbers(7), group=group, async_op=True), x]
        works[0].wait()
        note("all_reduce later", works[1])
        for source in range(count):
            dist.broadcast(x := numbers(6), group=group, group_src=source)
            note(f"broadcast from {source}", x)
        dist.reduce(x := numbers(6), group=group, group_dst=count - 1)
        note("reduce", *([x] if place == count - 1 else []))
        parts = [torch.empty(4) for _ in range(count)]
        dist.all_gather(parts, numbers(4), group=group)
        note("all_gather", *parts)
        collected = [torch.empty(4) for _ in range(count)] if place == 0 else None
        dist.gather(numbers(4), collected, group=group, group_dst=0)
        note("gather", *(collected or []))
        gather_flat(whole := torch.empty(count * 4), numbers(4), group=group)
        note("all_gather of one", whole)
        # FSDP gathers into a buffer that holds the shard already.
        whole.zero_()[place * 4 : (place + 1) * 4] = numbers(4)
        gather_flat(whole, whole[place * 4 : (place + 1) * 4], group=group)
        note("all_gather in place", whole)
        scatter_flat(part := torch.empty(5), numbers(count * 5), group=group)
        note("reduce_scatter", part)
        dist.all_to_all_single(rows := torch.empty(count, 3), numbers(count, 3), group=group)
        note("all_to_all", rows)
        sent = [place + other for other in range(count)]
        x = torch.empty(sum(sent))
        dist.all_to_all_single(x, numbers(sum(sent)), sent, sent, group=group)
        note("all_to_all of other sizes", x)
        note("traced sum", functional.wait_tensor(functional.all_reduce(numbers(9), "sum", group)))
        name = group.group_name
        note("traced gather", functional.wait_tensor(gather_traced(numbers(2, 3), 1, name)))
        x = functional.wait_tensor(scatter_traced(numbers(2, 3 * count), "sum", 1, name))
        note("traced scatter", x)
        after, before = (dist.get_global_rank(group, (place + n) % count) for n in (1, -1))
        x, received = numbers(8), torch.empty(8)
        transfers = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
        )
        if copied:
            x.zero_()  # what is sent is a copy
        for work in transfers:
            work.wait()
        note("round the ring", received)
    assert size > 2
    return found


def plain_and_staged(folder: str) -> list[dict[str, list[Any]]]:
    plain = all_collectives(copied=False)
    change_over(folder)
    return [plain, all_collectives(copied=True)]


@pytest.mark.parametrize("processes", [3, 4])
def test_every_collective_gives_what_gloo_gives(
    crowd: Crowd, tmp_path: Path, processes: int
) -> None:
    for rank, (plain, staged) in enumerate(crowd(processes, plain_and_staged, str(tmp_path))):
        assert len(plain) >= 20 and ("traced sum, some" in plain) is (rank in (0, 2))
        for name, expected in plain.items():
            assert staged[name] == expected, name
        assert plain.keys() == staged.keys()


def received_when() -> list[list[float]]:
    """What a tensor holds before and after its exchange is waited for."""
    x = torch.full((2,), float(dist.get_rank()))
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    before = x.tolist()
    work.wait()
    after = x.tolist()
    x.zero_()
    work.wait()
    return [before, after, x.tolist()]


def staged_when(folder: str) -> list[list[float]]:
    change_over(folder)
    return received_when()


def test_a_result_is_there_once_it_is_waited_for(crowd: Crowd, tmp_path: Path) -> None:
    """So that it is written on the stream that uses it, and only once."""
    for rank, answer in enumerate(crowd(3, staged_when, str(tmp_path))):
        assert answer == [[float(rank)] * 2, [3.0] * 2, [0.0] * 2]


def lost_peer(folder: str) -> str:
    """How the others learn that a process is gone, or answers no more."""
    change_over(folder)
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return "gone"
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        from gristmill.distributed.liveness.verdict import may_come_from_peer

        return f"{may_come_from_peer(error)}"
    return "nothing"


def test_a_lost_process_is_noticed(crowd: Crowd, tmp_path: Path) -> None:
    assert crowd(3, lost_peer, str(tmp_path)) == ["True", "gone", "True"]


def on_host_as_they_are(folder: str) -> bool:
    change_over(folder, everything=False)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    work.wait()
    return "Staged" in type(work).__name__


def test_tensors_on_the_host_are_not_copied(crowd: Crowd, tmp_path: Path) -> None:
    assert crowd(2, on_host_as_they_are, str(tmp_path)) == [False, False]


# ------------------------------------------------------------------ layouts

QUICK = ("shares", "tensor and sequence", "ring", "heads", "zero-bubble")
LONG = (*LAYOUTS, *MORE)


def layouts_both_ways(
    folder: str, cases: list[tuple[str, ...]], steps: int
) -> list[list[list[Curve]]]:
    """Each case over gloo, and through host memory."""
    plain = [both(words, steps) for words in cases]
    change_over(folder)
    return [plain, [both(words, steps) for words in cases]]


def assert_same(crowd: Crowd, folder: Path, names: list[str], *, processes: int) -> None:
    layouts = LAYOUTS | MORE
    settings = [layouts[name][1] for name in names]
    cases = [(*model_for(text), *parallel_words(text)) for text in settings]
    for plain, staged in crowd(processes, layouts_both_ways, str(folder), cases, 2):
        for name, one, other in zip(names, plain, staged, strict=True):
            assert one == other, name


def test_layouts_compute_the_same_through_host_memory(crowd: Crowd, tmp_path: Path) -> None:
    """To the bit: the sums are those of gloo."""
    assert_same(crowd, tmp_path, list(QUICK), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_all_layouts_compute_the_same_through_host_memory(
    crowd: Crowd, tmp_path: Path, processes: int
) -> None:
    names = [name for name in LONG if (LAYOUTS | MORE)[name][0] == processes]
    assert_same(crowd, tmp_path, names, processes=processes)


def compiled(folder: str) -> list[list[float]]:
    """Losses of layouts whose graphs hold collectives, not compiled and compiled."""
    change_over(folder)
    real: Callable[..., Any] = torch.compile

    def traced(function: Any, **options: Any) -> Any:
        return real(function, **{**options, "backend": "aot_eager", "options": None})

    torch.compile = traced  # type: ignore[assignment]
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    found = []
    for layout in ("parallel.tp=2", "parallel.cp=2"):
        for how in ("false", "true"):
            words = (layout, "model.layers=1", f"runtime.compile={how}")
            found.append(run(words, packed=False, steps=2)["losses"])
    return found


@pytest.mark.slow
def test_collectives_in_graphs_go_through_host_memory(crowd: Crowd, tmp_path: Path) -> None:
    for answer in crowd(2, compiled, str(tmp_path)):
        tensor, tensor_compiled, ring, ring_compiled = answer
        assert tensor_compiled == pytest.approx(tensor, rel=1e-5)
        assert ring_compiled == pytest.approx(ring, rel=1e-5)
