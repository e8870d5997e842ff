"""Groups of a view: they are left when it changes, whatever is under way in them."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gristmill.distributed.control import UNFINISHED, ControlGroup, wait_for
from gristmill.strategies.decentralized.codecs import Transfer, build_codec
from gristmill.strategies.decentralized.coordinator import SignedStore
from gristmill.strategies.decentralized.membership import View, ViewChangedError
from gristmill.strategies.decentralized.view_world import ViewGroups, forget_finished

LIMIT = 60.0


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    store = dist.TCPStore("127.0.0.1", number, is_master=True, wait_for_workers=False)
    yield number
    del store


class Interrupt:
    """Raises once the view has changed."""

    def __init__(self) -> None:
        self.changed = threading.Event()

    def __call__(self) -> None:
        if self.changed.is_set():
            raise ViewChangedError("a worker was lost")


def groups_of(port: int, worker: int, *, number: int = 0, members: int = 2) -> ViewGroups:
    store = SignedStore(
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), b"k" * 32
    )
    view = View(number, dict.fromkeys(range(members), ""))
    return ViewGroups(view, store, worker=worker, timeout=600, interrupt=Interrupt())


def together(*acts: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result(LIMIT) for future in [pool.submit(act) for act in acts]]


@pytest.mark.parametrize("send", ["fp32", "bf16", "int8", "top-k"])
def test_all_formats_can_be_sent(port: int, send: str) -> None:
    """Three workers use all kinds of collectives."""

    def exchange(worker: int) -> torch.Tensor:
        groups = groups_of(port, worker, members=3)
        group = groups.of((0, 1, 2), purpose="exchange")
        assert group is not None
        values = torch.full((1000,), float(2**worker))
        transfer = Transfer(build_codec(send, density=1.0), groups.interrupt)
        return transfer.sum(values, group, round_sum=False).total

    sums = together(*(lambda worker=worker: exchange(worker) for worker in range(3)))
    for total in sums:
        assert torch.equal(total, torch.full((1000,), 7.0))


def test_who_waits_for_a_member_that_never_comes_is_interrupted(port: int) -> None:
    groups = groups_of(port, 0)
    assert isinstance(groups.interrupt, Interrupt)
    threading.Timer(0.3, groups.interrupt.changed.set).start()
    with pytest.raises(ViewChangedError):
        groups.of((0, 1), purpose="exchange")


def test_a_member_that_dies_while_all_connect_costs_no_timeout(port: int) -> None:
    """It said that it is there, and nothing more."""
    groups = groups_of(port, 0)
    assert isinstance(groups.interrupt, Interrupt) and groups.store is not None
    prefix = dist.PrefixStore("view-0/exchange/0-1", groups.store)
    prefix.set("here/1", "")
    threading.Timer(0.5, groups.interrupt.changed.set).start()
    with pytest.raises(ViewChangedError):
        groups.of((0, 1), purpose="exchange")


def test_an_abandoned_collective_keeps_its_group_and_nothing_waits_for_it(port: int) -> None:
    """Until the others have closed theirs, which ends it."""
    pair = [groups_of(port, worker) for worker in range(2)]
    made = together(*(lambda one=one: one.of((0, 1), purpose="control") for one in pair))
    interrupt = pair[0].interrupt
    assert isinstance(interrupt, Interrupt)
    interrupt.changed.set()
    with pytest.raises(ViewChangedError):
        ControlGroup(made[0], interrupt=interrupt).barrier()
    assert [group for _, group in UNFINISHED] == [made[0]]
    began = time.monotonic()
    pair[0].leave()
    assert len(UNFINISHED) == 1, "it cannot end yet"
    made[1] = None
    pair[1].leave()
    gc.collect()
    while UNFINISHED:
        assert time.monotonic() < began + LIMIT, "it does not end"
        time.sleep(0.02)
        forget_finished()


@pytest.mark.slow
def test_connections_of_older_views_are_closed(port: int) -> None:
    pair = [groups_of(port, worker) for worker in range(2)]
    stores = [one.store for one in pair]

    def visit(worker: int, number: int) -> None:
        view = View(number, {0: "", 1: ""})
        groups = ViewGroups(view, stores[worker], worker=worker, timeout=600, interrupt=Interrupt())
        group = groups.of((0, 1), purpose="control")
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        wait_for(work, groups.interrupt, group=group)
        groups.leave()

    open_files = []
    for number in range(12):
        together(*(partial(visit, worker, number) for worker in range(2)))
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[-1] <= open_files[3] + 4, open_files
