"""The store through which processes find each other."""

from __future__ import annotations

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.distributed.liveness.rendezvous import join_store, serve_store


def free_place() -> ProcessInfo:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ProcessInfo(0, 0, 2, address=Address("127.0.0.1", probe.getsockname()[1]))


def test_what_one_writes_the_other_reads() -> None:
    place = free_place()
    store = serve_store(place)
    store.set("corn", "1")
    again = serve_store(place)
    other = join_store(place, seconds=60)
    other.set("flour", "2")
    assert store.multi_get(["corn", "flour"]) == again.multi_get(["corn", "flour"]) == [b"1", b"2"]
    assert other.check(["corn"]) and not other.check(["corn", "bread"])
    del store
    assert other.get("corn") == b"1", "one that hosts it is left"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_processes_of_one_machine_accept_no_other_host() -> None:
    place = free_place()
    assert place.address is not None
    store = serve_store(place)
    store.set("corn", "1")
    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        stranger.connect(("127.0.0.2", place.address.port))


def test_a_port_that_is_taken_is_a_user_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = ProcessInfo(0, 0, 2, address=Address("127.0.0.1", other.getsockname()[1]))
        with pytest.raises(UserError, match="cannot host the rendezvous at 127") as caught:
            serve_store(place)
    assert caught.value.exit is Exit.PEER
    assert "EADDRINUSE" in str(caught.value)


def test_joining_waits_quietly_for_the_store(capfd: pytest.CaptureFixture[str]) -> None:
    place = free_place()
    with pytest.raises(RuntimeError, match=f"nothing answers at {place.address}"):
        join_store(place, seconds=0.3)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join_store, place, seconds=60)
        time.sleep(0.3)
        store = serve_store(place)
        store.set("corn", "1")
        assert joined.result().get("corn") == b"1"
    assert capfd.readouterr().err == ""
