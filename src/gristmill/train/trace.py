"""From a profiler's trace to where the time went: by stage of a step, and by kind of work.

    host     |- data -|------ forward ------|------ backward ------|- update -|- records -|
               launches  |    |   |            |     |    |           |   |
    device               [gemm][attention][fused] ... [gemm][gemm] ...[adam]

A trace is the list of events that torch.profiler exports. On a GPU the work is its kernels: each
belongs to the stage in which the host launched it, however late it ran. On the CPU the work is the
operators of the training thread, each without the time of those inside it. In both cases the times
of all work add up to the time that the device, or the thread, was busy.

What kind of work it is, is told by the name, with one exception: whatever the loss launches, its
matrix products included, is the head's. Names that no rule knows are "other".
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Event = Mapping[str, Any]


class Stage(StrEnum):
    """What a step is doing."""

    DATA = "data wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "optimizer"
    RECORDS = "records"
    OTHER = "other"


class Part(StrEnum):
    """A kind of work."""

    MATRIX = "matrix products"
    ATTENTION = "attention"
    HEAD = "loss and head"
    FUSED = "norms, activations, element-wise"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    COPIES = "copies and fills"
    OTHER = "other"


RANGES = {
    "gristmill::data": Stage.DATA,
    "gristmill::forward": Stage.FORWARD,
    "gristmill::backward": Stage.BACKWARD,
    "gristmill::update": Stage.UPDATE,
    "gristmill::records": Stage.RECORDS,
}
"""Names under which the program marks its stages for the profiler."""

_HEAD = re.compile(r"cross_?entropy", re.IGNORECASE)
_ELEMENT_WISE = (
    "abs|add|amax|amin|any|bernoulli|bitwise|cat|clamp|cos|cumsum|div|dropout|eq|exp|gather|ge|gelu"
    "|isfinite|isinf|isnan|layer_norm|le|log|lt|masked_fill|max|maximum|mean|min|minimum|mul|native"
    "|ne|neg|norm|pow|reciprocal|relu|rms_norm|rsqrt|rsub|scatter|sigmoid|sign|silu|sin|softmax"
    "|sqrt|square|sub|sum|tanh|threshold|triu|tril|var|where"
)
_RULES: tuple[tuple[Part, re.Pattern[str]], ...] = tuple(
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        (Part.ATTENTION, r"flash|fmha|sdpa|attention|attn"),
        (Part.HEAD, r"cross_?entropy|nll_loss|log_softmax|logsumexp"),
        (Part.EMBEDDING, r"embedding|indexselect|index_select|index_put"),
        (
            Part.MATRIX,
            r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|triton_(tem|mm)|mkldnn|_mm_kernel|activated_product"
            r"|^aten::(mm|addmm|bmm|baddbmm|addbmm|dot|_?scaled_(grouped_)?mm|_int_mm)_?$",
        ),
        (Part.OPTIMIZER, r"multi_tensor_apply|fused_?adam|_foreach|lpnorm|orthogonal|muon"),
        (
            Part.COPIES,
            r"memcpy|memset|direct_copy|catarray|fillfunctor"
            r"|^aten::(copy_|_to_copy|clone|contiguous|zero_|fill_|cat|stack|zeros|ones|full)",
        ),
        (
            Part.FUSED,
            r"^triton_(poi|red|per|for)|elementwise|reduce_kernel|layer_?norm|rms_?norm|gelu|dropout"
            rf"|cpp_fused|CompiledFxGraph|^aten::_?({_ELEMENT_WISE})(_|$)",
        ),
    )
)


def part_of(name: str, *, stage: Stage) -> Part:
    """The kind of work that a kernel or operator of this name does."""
    found = next((part for part, rule in _RULES if rule.search(name)), Part.OTHER)
    if stage is Stage.UPDATE and found in (Part.FUSED, Part.EMBEDDING):
        return Part.OPTIMIZER
    return found


@dataclass(frozen=True)
class Work:
    """One kernel of the device, or one operator of the CPU without those inside it."""

    name: str
    stage: Stage
    part: Part
    seconds: float
    """Time in which no earlier work was still running."""


@dataclass(frozen=True)
class Trace:
    """What a trace says about some steps."""

    work: tuple[Work, ...]
    host: Mapping[Stage, float]
    """Seconds that the training thread spent in each stage."""
    seconds: float
    """Time of the training thread from the first stage to the last."""

    @property
    def busy(self) -> float:
        return sum(one.seconds for one in self.work)


def read_trace(events: Iterable[Event], *, on_gpu: bool) -> Trace:
    """Find the work of all steps in the events of a trace."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    host = [event for event in spans if event.get("cat") in _HOST_CATEGORIES]
    marks = [event for event in host if event["name"] in RANGES]
    assert marks, "the trace holds no stage of a step"
    main = marks[0]["tid"]
    stages = _Stages([event for event in marks if event["tid"] == main])
    nodes = list(_nested(host, stages))
    own = [node for node in nodes if node.event["tid"] == main]
    begin = min(event["ts"] for event in marks)
    end = max(event["ts"] + event["dur"] for event in marks)
    work = _kernels(spans, nodes, stages) if on_gpu else _operators(own, begin=begin, end=end)
    times: dict[Stage, float] = defaultdict(float)
    for node in own:
        if begin <= node.event["ts"] < end:
            times[node.stage] += node.own / 1e6
    total = (end - begin) / 1e6
    times[Stage.OTHER] = total - sum(t for stage, t in times.items() if stage is not Stage.OTHER)
    return Trace(tuple(work), dict(times), total)


_HOST_CATEGORIES = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


class _Stages:
    """Which stage the training thread was in at a time; of nested ones the inner one."""

    def __init__(self, marks: Sequence[Event]) -> None:
        self._times: list[float] = []
        self._stages: list[Stage] = []
        open_: list[Event] = []
        for event in sorted(marks, key=_order):
            self._close(open_, until=event["ts"])
            open_.append(event)
            self._note(event["ts"], open_)
        self._close(open_, until=float("inf"))

    def at(self, time: float) -> Stage:
        last = bisect_right(self._times, time) - 1
        return self._stages[last] if last >= 0 else Stage.OTHER

    def _close(self, open_: list[Event], *, until: float) -> None:
        while open_ and _end(open_[-1]) <= until:
            end = _end(open_.pop())
            self._note(end, open_)

    def _note(self, time: float, open_: list[Event]) -> None:
        self._times.append(time)
        self._stages.append(RANGES[open_[-1]["name"]] if open_ else Stage.OTHER)


@dataclass
class _Node:
    """An event of the host and how it lies in others."""

    event: Event
    stage: Stage
    of_head: bool
    own: float = field(default=0.0)
    """Microseconds outside the events within."""


def _nested(events: Sequence[Event], stages: _Stages) -> Iterator[_Node]:
    """All events of the host, each with its own time."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        open_: list[_Node] = []
        for event in sorted(thread, key=_order):
            while open_ and event["ts"] >= _end(open_[-1].event):
                open_.pop()
            outer = open_[-1] if open_ else None
            of_head = bool(_HEAD.search(event["name"])) or (outer is not None and outer.of_head)
            node = _Node(event, stages.at(event["ts"]), of_head, own=event["dur"])
            if outer is not None:
                # Rounding may let an event end a little after the one around it.
                inside = min(_end(event), _end(outer.event)) - event["ts"]
                outer.own = max(0.0, outer.own - inside)
            open_.append(node)
            yield node


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _order(event: Event) -> tuple[float, float]:
    """By beginning, the outer of two that begin together first."""
    return event["ts"], -event["dur"]


def _operators(nodes: Sequence[_Node], *, begin: float, end: float) -> Iterator[Work]:
    for node in nodes:
        name = node.event["name"]
        if begin <= node.event["ts"] < end and node.own > 0:
            part = _part(name, node)
            yield Work("(between operators)" if name in RANGES else name, *part, node.own / 1e6)


def _kernels(spans: Sequence[Event], nodes: Sequence[_Node], stages: _Stages) -> Iterator[Work]:
    """Work of the device, in the order in which it began."""
    launches = {
        node.event["args"]["correlation"]: node
        for node in nodes
        if "correlation" in node.event.get("args", {})
    }
    kernels = [event for event in spans if event.get("cat") in _DEVICE_CATEGORIES]
    done = float("-inf")
    for event in sorted(kernels, key=lambda event: event["ts"]):
        alone = max(0.0, _end(event) - max(event["ts"], done))
        done = max(done, _end(event))
        launch = launches.get(event.get("args", {}).get("correlation"))
        stage = stages.at(event["ts"]) if launch is None else launch.stage
        part = Part.HEAD if launch is not None and launch.of_head else None
        yield Work(event["name"], stage, part or part_of(event["name"], stage=stage), alone / 1e6)


def _part(name: str, node: _Node) -> tuple[Stage, Part]:
    return node.stage, Part.HEAD if node.of_head else part_of(name, stage=node.stage)
