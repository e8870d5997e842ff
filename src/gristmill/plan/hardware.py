"""Kinds of devices: peaks, memory, links, power, price, and the constants of the step's formula.

`hardware.toml` has one table for each kind, and says where each figure comes from. `peak_flops` of
plan/arithmetic.py reads the same table.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from gristmill.base.errors import UserError


@dataclass(frozen=True)
class Rates:
    """What programs get out of a device, as shares of what its maker states, and its delays."""

    product_share: float = 0.75
    """Of the peak, that very large matrix products reach."""
    product_share_fp8: float = 0.55
    """The same in fp8, of the peak in fp8; casts are counted apart."""
    half_rows: float = 250.0
    """Rows at which a product needs twice the time of its part in a very large one."""
    half_features: float = 150.0
    """The same for inner and outer size."""
    attention_share: float = 0.4
    """Of the peak in bf16, that flash attention reaches with heads of very many features."""
    attention_share_native: float = 0.4
    """The same with kernels that are made for this kind of GPU."""
    half_head: float = 16.0
    """Features of a head at which attention needs twice the time."""
    memory_share: float = 0.75
    """Of the memory's bandwidth, that elementwise kernels reach."""
    gap: float = 2e-6
    """Seconds between two kernels, even if the next one is already queued."""
    launch: float = 7e-6
    """Seconds of the host to launch one kernel."""
    kernels: float = 40.0
    """Kernels of one pass over one block, each operation by itself."""
    kernels_fused: float = 14.0
    """The same with elementwise operations fused."""
    link_share: float = 0.7
    """Of the bandwidth of a link inside a node, that collectives reach."""
    network_share: float = 0.6
    """The same between nodes."""
    exposed_tensor: float = 0.4
    """What is left of tensor-parallel collectives that run beside their products."""
    hidden_data: float = 0.6
    """The share of the passes behind which collectives of data parallelism can hide."""
    step: float = 2e-3
    """Seconds of a step that no other part counts: the loop, clipping, the data."""


@dataclass(frozen=True)
class Link:
    """A connection of one device."""

    name: str
    bandwidth: float
    """Bytes a second of one device in one direction."""
    latency: float
    """Seconds of one hop."""


@dataclass(frozen=True)
class Hardware:
    """A kind of device, in nodes of some size."""

    name: str
    peaks: tuple[tuple[str, float], ...]
    """Dense FLOP/s by number format."""
    memory: int
    """Bytes."""
    memory_bandwidth: float
    inside: Link
    between: Link
    per_node: int = 8
    watts: float = 0.0
    """Of one device at full load."""
    price: float | None = None
    """US dollars for one device and hour; None where none is listed."""
    rates: Rates = field(default_factory=Rates)
    source: str = ""

    @property
    def device(self) -> str:
        """What `runtime.device` calls it."""
        if self.name == "cpu":
            return "cpu"
        return "xla" if self.name.startswith("tpu") else "cuda"

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 is its fast format."""
        return self.device != "cpu" and "bf16" in dict(self.peaks)

    @property
    def has_fp8(self) -> bool:
        """Whether it has products in fp8."""
        return "fp8" in dict(self.peaks)

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in a number format."""
        for name, value in self.peaks:
            if name == precision:
                return value
        return self.peaks[0][1]

    def path(self, *, group: int, stride: int) -> tuple[float, float]:
        """Bandwidth and latency of a collective over a group of devices that are `stride` ranks
        apart. Devices of a node that belong to other groups share its network."""
        per_node = self.per_node
        inside = self.inside.bandwidth * self.rates.link_share
        if group * stride <= per_node:
            return inside, self.inside.latency
        rings = min(stride, per_node)
        network = self.between.bandwidth * self.rates.network_share * per_node / rings
        return min(inside, network), self.between.latency


def open_hardware(name: str, *, where: str = "--gpu") -> Hardware:
    """The kind of device of a name such as "h100-80gb"."""
    found = _kinds().get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), _kinds(), n=3, cutoff=0.4)
    known = ", ".join(_kinds())
    remedy = f"did you mean {' or '.join(near)}? All: {known}" if near else f"known: {known}"
    raise UserError(f"no kind of device is called {name!r}", where=where, remedy=remedy)


def known_hardware() -> tuple[str, ...]:
    """The names of all kinds."""
    return tuple(_kinds())


def match_hardware(device_name: str, *, memory: int | None = None) -> Hardware | None:
    """The kind that a device calls itself, and of those with one name that of its memory; None if
    the table has none."""
    fitting = [kind for words, kind in _matches() if re.search(words, device_name.lower())]
    if not fitting:
        return None
    same = [kind for kind in fitting if kind.peaks == fitting[0].peaks]
    if memory is None:
        return fitting[0]
    return min(same, key=lambda kind: abs(kind.memory - memory))


@cache
def known_links() -> dict[str, Link]:
    """Links by name."""
    rows = _table()["link"].items()
    return {name: Link(name, row["gb"] * 1e9, row["us"] * 1e-6) for name, row in rows}


def open_link(text: str) -> Link:
    """A link by its name, or by its Gbit/s for each device, such as "100"."""
    if text in known_links():
        return known_links()[text]
    try:
        gigabits = float(text)
    except ValueError:
        gigabits = 0.0
    if gigabits > 0:
        return Link(f"{text} Gbit/s", gigabits / 8 * 1e9, 30e-6)
    raise UserError(
        f"no link is called {text!r}",
        where="--link",
        remedy=f"give Gbit/s for each device, such as 100, or one of {', '.join(known_links())}",
    )


def on_network(hardware: Hardware, *, per_node: int | None, link: Link | None) -> Hardware:
    """The same devices in nodes of another size, on another network."""
    return replace(
        hardware, per_node=per_node or hardware.per_node, between=link or hardware.between
    )


# ------------------------------------------------------------------ the table


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((resources.files("gristmill.plan") / "hardware.toml").read_text())


@cache
def _kinds() -> dict[str, Hardware]:
    rows = (*_table()["device"], *_table()["host"])
    return {row["name"]: _kind(row) for row in reversed(rows)}


@cache
def _matches() -> tuple[tuple[str, Hardware], ...]:
    return tuple((rf"\b{re.escape(row['match'])}\b", _kind(row)) for row in _table()["device"])


def _kind(row: dict[str, Any]) -> Hardware:
    formats = {"bf16": "bf16", "fp16": "bf16", "tf32": "tf32", "fp32": "fp32", "fp8": "fp8"}
    columns = {name: f"{column}_tflops" for name, column in formats.items()}
    links, rates = known_links(), _table()["rates"][row["rates"]]
    return Hardware(
        name=row["name"],
        peaks=tuple(
            (name, row[column] * 1e12) for name, column in columns.items() if column in row
        ),
        memory=int(row["memory_gib"] * 2**30),
        memory_bandwidth=row["bandwidth_gb"] * 1e9,
        inside=links[row["inside"]],
        between=links[row["between"]],
        per_node=row["per_node"],
        watts=row["watts"],
        price=row.get("price"),
        rates=Rates(
            **{item.name: rates[item.name] for item in fields(Rates) if item.name in rates}
        ),
    )
