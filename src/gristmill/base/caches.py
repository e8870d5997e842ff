"""Where this user's caches are, and which of them make the next start quicker.

    ~/.cache/gristmill/inductor    what torch.compile made; torch's own default is temporary
    ~/.cache/gristmill/pycache     Python's bytecode, if packages come without it and none can be
                                   written beside them

An image built with PYTHONDONTWRITEBYTECODE, or one that is read-only, has no bytecode: Python then
compiles all of torch's source at every start, which takes ten seconds and more.
"""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

_LARGEST = "torch"
"""The package whose bytecode matters."""


def cache_folder() -> Path:
    """The cache of this program, where files can also be put by hand: `gristmill` in
    $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gristmill"


def use_compile_caches() -> None:
    """Keep what Python and torch compile for the next start, also that of child processes; call it
    before anything large is imported."""
    try:
        root = cache_folder()
    except RuntimeError:
        return  # this user has no home
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
    if sys.pycache_prefix is None and _lacks_bytecode():
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(root / "pycache")
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _lacks_bytecode() -> bool:
    """Whether the largest package has no bytecode and will never have any."""
    # Not by importlib's finders: those are for who means to import it.
    places = (Path(entry or ".", _LARGEST, "__init__.py") for entry in sys.path)
    source = next(filter(Path.is_file, places), None)
    if source is None or Path(cache_from_source(source)).exists():
        return False
    return sys.dont_write_bytecode or not os.access(source.parent, os.W_OK)
