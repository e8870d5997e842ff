"""The table of devices and links."""

from __future__ import annotations

import pytest

from gristmill.base.errors import UserError
from gristmill.plan.hardware import (
    known_hardware,
    known_links,
    match_hardware,
    on_network,
    open_hardware,
    open_link,
)

ASKED = (
    *("a100-40gb", "a100-80gb", "h100-80gb", "h100-pcie", "h100-nvl", "h200", "b200", "gb200"),
    *("mi300x", "l4", "l40s", "rtx-4090", "rtx-5090", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"),
    "cpu",
)


@pytest.mark.parametrize("name", known_hardware())
def test_every_kind_is_complete(name: str) -> None:
    kind = open_hardware(name)
    assert kind.name == name
    assert 2**33 <= kind.memory <= 2**38
    assert 1e10 <= kind.memory_bandwidth <= 1e13
    assert kind.peak("bf16") >= kind.peak("fp32") > 0
    assert kind.inside.bandwidth > 0
    assert kind.between.bandwidth > 0
    assert kind.watts > 0
    shares = ("product_share", "attention_share", "memory_share", "link_share", "network_share")
    assert all(0 < getattr(kind.rates, share) <= 1 for share in shares)


def test_the_usual_kinds_are_known() -> None:
    assert set(ASKED) <= set(known_hardware())


def test_an_unknown_kind_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(UserError, match="h1000") as error:
        open_hardware("h1000")
    assert "h100-80gb" in str(error.value.problems[0].remedy)


@pytest.mark.parametrize(
    ("device", "gibibytes", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA L4", 22.0, "l4"),
    ],
)
def test_a_device_is_found_by_what_it_calls_itself(
    device: str, gibibytes: float, name: str
) -> None:
    found = match_hardware(device, memory=int(gibibytes * 2**30))
    assert found is not None
    assert found.name == name


def test_a_device_that_nobody_knows_has_no_kind() -> None:
    assert match_hardware("Tesla T4") is None


def test_a_link_is_a_name_or_gigabits_a_second() -> None:
    assert open_link("hdr200") == known_links()["hdr200"]
    assert open_link("100").bandwidth == 100e9 / 8
    for wrong in ("fast", "-3", "0"):
        with pytest.raises(UserError, match="no link"):
            open_link(wrong)


def test_devices_of_a_node_share_its_network() -> None:
    """Groups that stand side by side in a node each have a part of it."""
    kind = open_hardware("h100-80gb")
    inside, _ = kind.path(group=8, stride=1)
    alone, _ = kind.path(group=16, stride=1)
    beside, _ = kind.path(group=16, stride=8)
    assert inside > alone > beside
    assert alone <= 8 * beside


def test_another_network_leaves_the_device_as_it_is() -> None:
    kind = open_hardware("h100-80gb")
    slow = on_network(kind, per_node=4, link=open_link("10"))
    assert (slow.per_node, slow.between.bandwidth) == (4, 1.25e9)
    assert slow.peaks == kind.peaks
    assert on_network(kind, per_node=None, link=None) == kind
