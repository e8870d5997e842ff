"""Amounts with units: how far a run has come, and how far or how often something goes.

    Duration   "600k steps", "1M samples", "20B tokens"    an interval, a horizon, a warm-up
    Progress   steps, samples and tokens done so far       the only clock of a run
    a split    "969,30,1", "969:30:1"                      shares of a whole

A step is one optimizer update, a sample one window of text, which counts as `sequence` tokens.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from gristmill.base.errors import UserError

_MULTIPLIERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d{1,3}(?:,\d{3})+|\d[\d_]*)((?:\.\d+)?)"
_DURATION = re.compile(rf"{_NUMBER}\s*([kmbgt]?)\s*(steps?|samples?|tokens?)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|m|s)")
_TIME_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


class Unit(enum.Enum):
    """What a duration counts."""

    STEPS = "steps"
    SAMPLES = "samples"
    TOKENS = "tokens"


@dataclass(frozen=True)
class Progress:
    """How much a run has consumed: the only clock, and all that resuming needs."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def measured_in(self, unit: Unit) -> int:
        return int(getattr(self, unit.value))

    def after(self, *, samples: int, tokens: int) -> Progress:
        """The clock after one more step."""
        return Progress(self.steps + 1, self.samples + samples, self.tokens + tokens)

    def reached(self, horizon: Duration) -> bool:
        return self.measured_in(horizon.unit) >= horizon.amount


@dataclass(frozen=True)
class Duration:
    """An amount of steps, samples or tokens."""

    amount: int
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read "600k steps", "20B tokens", "1_000 samples"; the unit is required."""
        match = _DURATION.fullmatch(text.strip())
        if not match:
            raise UserError(
                f"{text!r} is not a duration",
                remedy='write a number and a unit: "500 steps", "1M samples" or "20B tokens"',
            )
        whole, fraction, letter, name = match.groups()
        digits = whole.replace(",", "").replace("_", "") + fraction
        amount = Decimal(digits) * _MULTIPLIERS[letter.lower()]
        unit = Unit(name.lower().removesuffix("s") + "s")
        if amount != int(amount):
            raise UserError(f"{text!r} is not a whole number of {unit.value}")
        return cls(int(amount), unit)

    @staticmethod
    def matches(text: str) -> bool:
        """Whether a text is written like a duration."""
        return _DURATION.fullmatch(text.strip()) is not None

    def __str__(self) -> str:
        return f"{format_exact(self.amount)} {self.unit.value}"

    def due(self, before: Progress, after: Progress) -> bool:
        """Whether a multiple of this interval lies in the step from `before` to `after`."""
        done, now_done = before.measured_in(self.unit), after.measured_in(self.unit)
        return self.amount > 0 and now_done // self.amount > done // self.amount


def format_exact(amount: int) -> str:
    """A form with a k, M, B or T that reads back as the same number: 2500 -> "2.5k"."""
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if amount >= size and amount % (size // 1000) == 0:
            thousandths = f"{amount % size * 1000 // size:03d}".rstrip("0")
            return f"{amount // size}{'.' if thousandths else ''}{thousandths}{letter}"
    return str(amount)


def format_count(amount: float) -> str:
    """About three digits for a person: 124439808 -> "124M"."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(amount) >= size:
            value = amount / size
            return f"{value:.0f}{letter}" if value >= 100 else f"{value:.3g}{letter}"
    return f"{amount:.0f}" if amount == int(amount) else f"{amount:.3g}"


def format_bytes(amount: float) -> str:
    """Bytes for a person, in powers of 1024: 1536 -> "1.5 KiB"."""
    for name, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            value = amount / size
            return f"{value:.3g} {name}" if value < 999.5 else f"{value:.0f} {name}"
    return f"{amount:.0f} B"


def format_seconds(seconds: float) -> str:
    """A span for a person: 3725 -> "1h02m05s"."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m{rest:02d}s"
    return f"{minutes}m{rest:02d}s" if minutes else f"{seconds:.1f}s"


def described_span(seconds: float) -> str:
    """A span of hours or days for a person."""
    days = seconds / 86400
    if days < 1:
        return format_seconds(seconds)
    return f"{days:.1f} days" if days < 100 else f"{days:,.0f} days"


def timestamp() -> str:
    """The local time, for records: "2026-07-01T09:30:00+02:00"."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def parse_seconds(text: str) -> float:
    """Read a wall-clock span: "90s", "30m", "3h30m", "1d"."""
    compact = text.replace(" ", "")
    parts = _TIME.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise UserError(f"{text!r} is not a time", remedy='write "90s", "30m", "3h30m" or "1d"')
    return sum(float(number) * _TIME_SECONDS[unit] for number, unit in parts)


def split_shares(split: str) -> list[float] | None:
    """Proportions of a split string as they are written, or None if it is not one."""
    try:
        parts = [float(part) for part in split.split(":" if ":" in split else ",")]
    except ValueError:
        return None
    if len(parts) not in (2, 3) or min(parts) < 0 or not all(map(math.isfinite, parts)):
        return None
    return parts if parts[0] > 0 else None


def parse_split(split: str) -> list[float] | None:
    """Proportions of a split string as fractions of one, or None if it is not one."""
    parts = split_shares(split)
    return None if parts is None else [part / sum(parts) for part in parts]
