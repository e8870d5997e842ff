"""Gristmill: text in, language model out.

    from gristmill import Model, Run

    run = Run.open("run.toml", "optim.lr=3e-4")
    run.train()
    print(run.generate("Once upon a time"))
    print(Model.open("gpt2").evaluate(text="book.txt"))

Both are imported when they are asked for, since they need torch, and most commands do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gristmill.model import Model
    from gristmill.train.run import Run

__all__ = ["Model", "Run"]

_MODULES = {"Model": "gristmill.model", "Run": "gristmill.train.run"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
