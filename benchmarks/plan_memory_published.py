"""Memory that other programs published, beside what the same formulas say of their layouts.

    python benchmarks/plan_memory_published.py

The rows are those of `planner/published_rows.csv` that print memory. These programs keep other
things than ours, so what each keeps is stated here once for all of its rows, as its documentation
has it:

    Megatron 2022   18 bytes a parameter; attention keeps its scores; dropout; the row's value is
                    activations alone
    nanotron        bf16 weights, fp32 gradients, 12 bytes of master weights and moments, which
                    zero1 divides; sequence parallel; logits of all tokens in bf16, fp32 and its
                    gradient; the first stage; one constant, fitted without the size it predicts
    torchtitan      FSDP2 with fp32 weights and moments; logits of all tokens with a loss that is
                    not compiled; every second product kept by its selective recomputation

Shapes: C width, F inner width, Q and G features of queries and of keys.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
ROWS = Path(__file__).parent / "planner" / "published_rows.csv"


class Shape(NamedTuple):
    """A published row, in numbers."""

    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    vocab: int
    sequence: int
    micro: int
    tp: int
    pp: int
    stages: int
    cp: int
    dp: int
    steps: int
    """Micro-batches of a step."""

    @classmethod
    def of(cls, row: dict[str, str]) -> Shape:
        def number(name: str, other: int = 1) -> int:
            return int(row[name]) if row[name].isdigit() else other

        heads, micro, dp = number("heads"), number("micro_batch"), number("dp")
        steps = max(1, number("global_batch_seqs", dp * micro) // (dp * micro))
        return cls(
            *(number("layers"), number("hidden"), heads, number("kv_heads", heads)),
            *(number("ffn"), number("vocab"), number("seq"), micro),
            *(number("tp"), number("pp"), number("vp"), number("cp"), dp, steps),
        )

    @property
    def tokens(self) -> float:
        return self.micro * self.sequence / self.cp

    @property
    def keys(self) -> float:
        return self.width * self.groups / self.heads

    def parameters(self, *, gated: bool, tied: bool) -> tuple[float, float]:
        """Of all layers, and of one end."""
        products = 2 * self.width * (self.width + self.keys)
        products += (3 if gated else 2) * self.width * self.inner
        return self.layers * products, (1 if tied else 2) * self.vocab * self.width / (
            1 if tied else 2
        )

    def in_flight(self) -> float:
        """Layers' worth of micro-batches on the first stage, relative to the layers there."""
        if self.stages > 1:
            chunks = (self.stages - 1) * self.pp + 2 * (self.pp - 1) + 1
            return min(chunks / self.stages, self.steps)
        return min(self.pp, self.steps)


def megatron(row: dict[str, str], one: Shape) -> float:
    """Bytes of activations."""
    t, scores = one.tp, 5 * one.heads * one.sequence / one.width
    selective = "selective" in row["recompute"]
    each = 34 / t if selective else 10 + 24 / t + scores / t
    return one.tokens * one.width * each * one.layers / one.pp * one.in_flight()


def nanotron_parts(row: dict[str, str], one: Shape) -> tuple[float, float]:
    """Bytes of states and logits of the first stage, and of what its blocks keep at least."""
    tied = _size(row) < 4
    layers, end = one.parameters(gated=True, tied=tied)
    held = layers / one.pp / one.tp + end / one.tp * (2 if one.pp == 1 and not tied else 1)
    divided = one.dp if row["sharding"] == "zero1" else 1
    token = 2 * (6 * one.width + 2 * one.keys + 4 * one.inner) / one.tp
    kept = one.tokens * token * one.layers / one.pp * one.in_flight()
    logits = one.tokens * one.vocab / one.tp * (2 + 4 + 4) if one.pp == 1 else 0.0
    return held * (2 + 4 + 12 / divided) + logits, kept


def _size(row: dict[str, str]) -> float:
    """Billions of parameters, which end the ids of nanotron's rows."""
    return float(row["id"].rpartition("-")[2])


def nanotron(row: dict[str, str], one: Shape) -> float:
    """With one constant, the middle one of the rows of all other sizes: how much more its blocks
    keep than they need to, since they are not compiled."""
    others = [
        other for other in rows() if other["id"].startswith("NT") and _size(other) != _size(row)
    ]
    known = [
        (float(other["memory_gib"]) * GIB, nanotron_parts(other, Shape.of(other)))
        for other in others
    ]
    factor = statistics.median((found - states) / kept for found, (states, kept) in known)
    states, kept = nanotron_parts(row, one)
    return states + factor * kept


def torchtitan(row: dict[str, str], one: Shape) -> float:
    layers, end = one.parameters(gated=True, tied=False)
    shards = one.dp * one.cp * one.tp * one.pp
    ends = 2 * end / one.tp
    states = 16 * (layers + 2 * end) / shards
    gathered = 2 * 3 * layers / one.layers / one.tp + (2 + 2) * ends
    t = one.tp
    products = (2 * one.width + 4 * one.keys, 4 * one.width + 4 * one.inner)
    if row["recompute"] == "full":
        token = 2 * one.width / t
        again = 2 * (6 * one.width + 2 * one.keys + 4 * one.inner) / t
    else:
        # Inputs, attention, and every second of seven products.
        token = (4 * one.width + sum(products) / 2 + one.width) / t
        again = 2 * (6 * one.width + 2 * one.keys + 4 * one.inner) / t
    # Logits in bf16, their logarithms of probabilities in fp32, and the gradients of these and of
    # the fp32 logits.
    logits = one.tokens * one.vocab / t * (2 + 4 + 4 + 4) if one.pp == 1 else 0.0
    micros = one.micro if one.pp == 1 else 1
    tokens = one.tokens if one.pp == 1 else one.tokens / micros
    kept = tokens * token * one.layers / one.pp * one.in_flight()
    return states + gathered + max(kept + logits, kept + tokens * again)


PROGRAMS = {"SPm": megatron, "NT": nanotron, "TT": torchtitan}


def rows() -> list[dict[str, str]]:
    """The published rows that print memory."""
    with ROWS.open() as file:
        return [row for row in csv.DictReader(file) if row["memory_gib"]]


def compared() -> Iterator[tuple[str, float, float]]:
    """The id of each row, what it printed, and what the formulas say, in GiB."""
    for row in rows():
        program = PROGRAMS[row["id"].partition("-")[0]]
        printed = row["value"] if program is megatron else row["memory_gib"]
        yield row["id"], float(printed), program(row, Shape.of(row)) / GIB
        if program is megatron:
            one = Shape.of(row)
            layers, end = one.parameters(gated=False, tied=True)
            states = 18 * (layers / one.pp + end) / one.tp / GIB
            yield f"{row['id']} states", float(row["memory_gib"]), states


def main() -> None:
    print("| row | published | formula | error |\n| --- | ---: | ---: | ---: |")
    errors: dict[str, list[float]] = {}
    for name, published, said in compared():
        error = said / published - 1
        errors.setdefault(name.partition("-")[0], []).append(abs(error))
        print(f"| {name} | {published:.1f} | {said:.1f} GiB | {error:+.1%} |")
    for program, of in errors.items():
        within = sum(error <= 0.1 for error in of)
        middle = statistics.median(of)
        print(f"{program}: {within} of {len(of)} within 10 %, median {middle:.1%}")


if __name__ == "__main__":
    main()
