"""From a profiler's trace to where the time of a step went: by phase, and by class of operation.

    host     |- data -|------ forward ------|------ backward ------|- update -|- records -|
               launches  |    |   |            |     |    |           |   |
    device               [gemm][attention][fused] ... [gemm][gemm] ...[adam]

On a GPU the operations are kernels; each belongs to the phase in which the host launched it. On the
CPU they are the operators of the training thread, each without the time of those inside it. Either
way their times add up to the time that the device, or the thread, was busy.

The name of an operation tells its class, except that everything the loss launches belongs to the
head, matrix products included.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

Event = Mapping[str, Any]


class StepPhase(StrEnum):
    """What a step is doing."""

    DATA = "data wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "optimizer"
    RECORDS = "records"
    OTHER = "other"


class OpClass(StrEnum):
    """What an operation computes."""

    MATRIX = "matrix products"
    ATTENTION = "attention"
    HEAD = "loss and head"
    FUSED = "norms, activations, element-wise"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    COPIES = "copies and fills"
    OTHER = "other"


PHASES = {f"gristmill::{phase.name.lower()}": phase for phase in StepPhase}
"""Names of the `record_function` ranges that mark the phases."""

_HOST_CATEGORIES = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}

_LOSS = re.compile(r"cross_?entropy", re.IGNORECASE)
_ELEMENT_WISE = (
    "abs|add|amax|amin|any|bernoulli|bitwise|cat|clamp|cos|cumsum|div|dropout|eq|exp|gather|ge|gelu"
    "|isfinite|isinf|isnan|layer_norm|le|log|lt|masked_fill|max|maximum|mean|min|minimum|mul|native"
    "|ne|neg|norm|pow|reciprocal|relu|rms_norm|rsqrt|rsub|scatter|sigmoid|sign|silu|sin|softmax"
    "|sqrt|square|sub|sum|tanh|threshold|triu|tril|var|where"
)
_PATTERNS = {
    OpClass.ATTENTION: r"flash|fmha|sdpa|attention|attn",
    OpClass.HEAD: r"cross_?entropy|nll_loss|log_softmax|logsumexp",
    OpClass.EMBEDDING: r"embedding|indexselect|index_select|index_put",
    OpClass.MATRIX: r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|triton_(tem|mm)|mkldnn|_mm_kernel"
    r"|activated_product|sum_of_products|^aten::(mm|addmm|bmm|baddbmm|addbmm|dot|_?scaled_(grouped_)?mm|_int_mm)_?$",
    OpClass.OPTIMIZER: r"multi_tensor_apply|adamw|fused_?adam|_foreach|lpnorm|orthogonal|muon",
    OpClass.COPIES: r"memcpy|memset|direct_copy|catarray|fillfunctor"
    r"|^aten::(copy_|_to_copy|clone|contiguous|zero_|fill_|cat|stack|zeros|ones|full)",
    OpClass.FUSED: r"^triton_(poi|red|per|for)|elementwise|reduce_kernel|layer_?norm|rms_?norm|gelu"
    rf"|dropout|cpp_fused|CompiledFxGraph|^aten::_?({_ELEMENT_WISE})(_|$)",
}
"""The first one that matches a name decides."""


@cache
def op_class(name: str, *, phase: StepPhase) -> OpClass:
    """The class of a kernel or operator, by its name."""
    matches = (kind for kind, pattern in _PATTERNS.items() if re.search(pattern, name, re.I))
    kind = next(matches, OpClass.OTHER)
    of_update = phase is StepPhase.UPDATE and kind in (OpClass.FUSED, OpClass.EMBEDDING)
    return OpClass.OPTIMIZER if of_update else kind


@dataclass(frozen=True)
class OpTime:
    """One kernel of the device, or one operator of the CPU without those inside it."""

    name: str
    phase: StepPhase
    kind: OpClass
    seconds: float
    """Time in which no earlier operation was still running."""


@dataclass(frozen=True)
class Trace:
    """What a trace says about some steps."""

    ops: tuple[OpTime, ...]
    host: Mapping[StepPhase, float]
    """Seconds that the training thread spent in each phase."""
    seconds: float
    """Time of the training thread from the first phase to the last."""

    @property
    def busy(self) -> float:
        return sum(op.seconds for op in self.ops)


def read_trace(events: Iterable[Event], *, on_gpu: bool) -> Trace:
    """The operations of all steps in the events of a trace."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    host = [event for event in spans if event.get("cat") in _HOST_CATEGORIES]
    marks = [event for event in host if event["name"] in PHASES]
    assert marks, "the trace holds no phase of a step"
    main = marks[0]["tid"]
    phase_at = _phase_finder([mark for mark in marks if mark["tid"] == main])
    calls = list(_host_calls(host, phase_at))
    begin, end = min(mark["ts"] for mark in marks), max(_end(mark) for mark in marks)
    own = [
        call
        for call in calls
        if call.event["tid"] == main and begin <= call.event["ts"] < end and call.own > 0
    ]
    ops = _kernels(spans, calls, phase_at) if on_gpu else _operators(own)
    times: dict[StepPhase, float] = defaultdict(float)
    for call in own:
        times[call.phase] += call.own / 1e6
    total = (end - begin) / 1e6
    times[StepPhase.OTHER] += total - sum(times.values())
    return Trace(tuple(ops), dict(times), total)


def _phase_finder(marks: Sequence[Event]) -> Callable[[float], StepPhase]:
    """Tells the phase that the training thread was in at a time; of nested ones the inner one."""
    marks = sorted(marks, key=_order)
    begins = [mark["ts"] for mark in marks]

    def phase_at(time: float) -> StepPhase:
        for number in range(bisect_right(begins, time) - 1, -1, -1):
            if time < _end(marks[number]):
                return PHASES[marks[number]["name"]]
        return StepPhase.OTHER

    return phase_at


@dataclass
class _HostCall:
    """An event of the host."""

    event: Event
    phase: StepPhase
    in_loss: bool
    own: float
    """Microseconds outside the calls within."""

    def class_of(self, name: str) -> OpClass:
        """The class of something that this call does or launches."""
        return OpClass.HEAD if self.in_loss else op_class(name, phase=self.phase)


def _host_calls(
    events: Sequence[Event], phase_at: Callable[[float], StepPhase]
) -> Iterator[_HostCall]:
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        stack: list[_HostCall] = []
        for event in sorted(thread, key=_order):
            while stack and event["ts"] >= _end(stack[-1].event):
                stack.pop()
            in_loss = bool(_LOSS.search(event["name"]) or (stack and stack[-1].in_loss))
            call = _HostCall(event, phase_at(event["ts"]), in_loss, own=event["dur"])
            if stack:
                # Rounding may let an event end a little after the one around it.
                inside = min(_end(event), _end(stack[-1].event)) - event["ts"]
                stack[-1].own = max(0.0, stack[-1].own - inside)
            stack.append(call)
            yield call


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _order(event: Event) -> tuple[float, float]:
    """By beginning, the outer of two that begin together first."""
    return event["ts"], -event["dur"]


def _operators(calls: Iterable[_HostCall]) -> Iterator[OpTime]:
    for call in calls:
        name = call.event["name"]
        shown = "(between operators)" if name in PHASES else name
        yield OpTime(shown, call.phase, call.class_of(name), call.own / 1e6)


def _kernels(
    spans: Iterable[Event], calls: Iterable[_HostCall], phase_at: Callable[[float], StepPhase]
) -> Iterator[OpTime]:
    """Kernels and copies of the device, in the order in which they began."""
    launches = {
        call.event["args"]["correlation"]: call
        for call in calls
        if "correlation" in call.event.get("args", {})
    }
    kernels = [event for event in spans if event.get("cat") in _DEVICE_CATEGORIES]
    done = float("-inf")
    for event in sorted(kernels, key=lambda event: event["ts"]):
        name, alone = event["name"], max(0.0, _end(event) - max(event["ts"], done))
        done = max(done, _end(event))
        launch = launches.get(event.get("args", {}).get("correlation"))
        launch = launch or _HostCall(event, phase_at(event["ts"]), in_loss=False, own=0)
        yield OpTime(name, launch.phase, launch.class_of(name), alone / 1e6)
