"""Reads the fields of a request: unknown ones are ignored, wrong ones refused by name.

A field that is null is one that was not given: clients send null for what they leave out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gristmill.web.refusals import bad_request

_SHOWN = 60
"""Characters of a value that a message repeats."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds."""
    if not body.strip():
        raise bad_request("the body is empty: send a JSON object")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("the JSON is nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise bad_request(f"the body is not JSON: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_kind(value)}")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _first_line(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return str(error).partition(";")[0]


def _kind(value: object) -> str:
    """What JSON calls a value."""
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "an array", str: "a string", int: "an integer"}
    return names.get(type(value), "a number" if isinstance(value, float) else "null")


def shown(value: object) -> str:
    """A value for a message."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return _kind(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


class Fields:
    """The fields of a request, or of an object in it."""

    def __init__(self, values: Mapping[str, Any], *, inside: str = "") -> None:
        """`inside` is the path of the object, such as `stream_options`."""
        self._values, self._inside = values, inside

    def name(self, key: str) -> str:
        """How messages call a field."""
        return f"{self._inside}.{key}" if self._inside else key

    def get(self, key: str) -> Any:
        """A value that may be anything; None if it was not given."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def wrong(self, key: str, wanted: str) -> Exception:
        """The refusal of a value."""
        name, value = self.name(key), self.get(key)
        if value is None:
            return bad_request(f"{name} is missing: it must be {wanted}", param=name)
        return bad_request(f"{name} must be {wanted}, not {shown(value)}", param=name)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integer(self, key: str, *, low: int, high: int | None = None) -> int | None:
        """`high`: None if there is no limit."""
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int:
            raise self.wrong(key, "an integer")
        if value < low or (high is not None and value > high):
            raise self.wrong(key, f"{low} or more" if high is None else f"from {low} to {high}")
        return value

    def number(self, key: str, *, low: float, high: float = math.inf) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise self.wrong(key, "a number")
        # An integer may be larger than any float, and 1e999 is read as infinity.
        if not low <= value <= high or value in (math.inf, -math.inf) or abs(value) > 1e300:
            wanted = f"from {low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            raise self.wrong(key, wanted)
        return float(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return require_text(value, param=self.name(key))

    def object(self, key: str) -> Fields:
        """The fields of an object, which has none if it was not given."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, inside=self.name(key))


def require_text(value: str, *, param: str) -> str:
    """A string that can be encoded: JSON can spell half of a surrogate pair, which is no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{param} is not valid Unicode text", param=param) from None
    return value
