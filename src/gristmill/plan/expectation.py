"""What a run should take on the devices that it has, by the plan of its own layout.

The run says it in its first lines and writes it into environment.json, and its last line says what
was seen. `launch` compares it with the time that a job asks for.

    gpu           constants of its kind, or those that `plan --calibrate` found on this machine
    processor     nothing unless it was calibrated: they differ by a factor of a hundred
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gristmill.base.errors import UserError
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.plan.calibration import calibrated, read_calibrations
from gristmill.plan.hardware import Hardware, match_hardware, open_hardware
from gristmill.plan.layouts import LayoutPlan, on_device, plan_layout


@dataclass(frozen=True)
class Expectation:
    """The plan of a run as it is."""

    layout: LayoutPlan
    device: str
    """The kind of device in the table."""
    calibrated: str | None
    """When it was measured on this machine; None for the table's constants."""

    @property
    def memory(self) -> int | None:
        """Bytes in tensors on the device that needs most; None on hosts, which count otherwise."""
        return None if self.device == "cpu" else self.layout.memory.allocated

    @property
    def source(self) -> str:
        """What the plan knows of the device."""
        if self.calibrated is None:
            return f"constants of {self.device}"
        return f"{self.device}, measured here on {self.calibrated[:10]}"

    def described(self, *, tokens: int) -> str:
        """In words, with the time for the tokens that are left."""
        step = self.layout.step
        text = f"{format_count(step.tokens_per_second)} tok/s"
        if self.device != "cpu":
            text += f", mfu {step.mfu:.1%}"
        if self.memory is not None:
            text += f", {format_bytes(self.memory)}"
        return f"{text}, {format_seconds(tokens / step.tokens_per_second)} ({self.source})"

    def seen(self, *, tokens_per_second: float, memory: int) -> str:
        """What was seen, beside what was planned."""
        text = f"{format_count(tokens_per_second)} tok/s"
        text += f" (planned {format_count(self.layout.step.tokens_per_second)})"
        if self.memory is not None:
            text += f", {format_bytes(memory)} (planned {format_bytes(self.memory)})"
        return text

    def as_json(self) -> dict[str, Any]:
        """For environment.json."""
        step = self.layout.step
        return {
            "tokens_per_second": step.tokens_per_second,
            "step_seconds": step.seconds,
            "mfu": step.mfu if self.device != "cpu" else None,
            "memory_bytes": self.memory,
            "with": self.source,
        }


def expect(
    config: RunConfig,
    mesh: Mesh,
    *,
    vocab: int,
    micro_batch: int,
    device_kind: str,
    device_name: str,
    device_memory: int | None = None,
    per_node: int | None = None,
) -> Expectation | None:
    """What a run should take on devices of this kind (cuda, cpu) and name; None where nothing is
    known of them."""
    if device_kind == "cpu":
        found: Hardware | None = open_hardware("cpu")
    else:
        found = match_hardware(device_name, memory=device_memory)
    if found is None or found.device != device_kind:
        return None
    calibration = read_calibrations().get(found.name)
    if calibration is None and device_kind == "cpu":
        return None
    hardware = found if calibration is None else calibrated(found, calibration)
    if per_node is not None and mesh.processes > per_node:
        hardware = replace(hardware, per_node=per_node)
    try:
        layout = plan_layout(
            on_device(config, hardware),
            mesh,
            hardware,
            vocab=vocab,
            micro_batch=micro_batch,
            recompute=config.train.recompute,
        )
    except UserError:  # a model whose shape the plan does not know
        return None
    when = None if calibration is None else calibration.when
    return Expectation(layout, hardware.name, when)
