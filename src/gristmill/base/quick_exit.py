"""The end of a process, without taking the interpreter apart.

Once torch is loaded, Python takes more than a second to find and free all objects at exit, which
the operating system does at once. Everything before that happens as always: threads are joined,
functions of `atexit` run, output is flushed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading


def quick_exit(status: int) -> None:
    """End this process; returns where a usual exit is needed."""
    join_threads = getattr(threading, "_shutdown", None)
    if join_threads is None:
        return
    join_threads()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a closed or broken output: Python reports it
        return
    os._exit(status)
