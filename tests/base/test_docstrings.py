"""Docstrings of attributes, from a class's source."""

from __future__ import annotations

from gristmill.config.documentation import attribute_docstrings


class Mill:
    """Two of these attributes are described."""

    stones: int = 2
    """Those that turn,
    and those that lie."""
    grain: str = "rye"
    wind = True
    """Whether it has sails."""


def test_they_stand_below_their_attributes() -> None:
    assert attribute_docstrings(Mill) == {
        "stones": "Those that turn,\nand those that lie.",
        "wind": "Whether it has sails.",
    }


def test_a_class_without_source_has_none() -> None:
    assert attribute_docstrings(type("Made", (), {"stones": 2})) == {}
