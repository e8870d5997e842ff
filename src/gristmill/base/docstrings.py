"""The docstrings below the attributes of a class, which Python itself forgets."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def attribute_docstrings(owner: type) -> dict[str, str]:
    """By attribute, from the source of the class; those of its bases are not among them. None if
    the source is not there, as in an installation of bytecode alone."""
    try:
        source = inspect.getsource(owner)
    except OSError:
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, below in pairwise(definition.body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found
