"""The program `gristmill`, also `python -m gristmill`."""

from __future__ import annotations

import atexit
import os
import sys
import threading


def main() -> None:
    """Run the command line. The commands take a moment to import, and a signal may arrive then."""
    if sys.argv[1:2] == ["train"]:
        from gristmill.base.exits import exit_on_stop_signals

        exit_on_stop_signals()
    if request := os.environ.get("_GRISTMILL_COMPLETE"):
        from gristmill.cli.completion import print_completions

        if print_completions(request):
            return
    if "--install-completion" in sys.argv[1:]:
        from gristmill.cli.completion import cache_commands

        cache_commands()
    from gristmill.base.caches import use_compile_caches

    use_compile_caches()
    from gristmill.cli.main import main as run

    run()


def program() -> None:
    """Run the command line as a process of its own."""
    status = 0
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, str):  # a message, which Python prints
            raise
        status = ended.code or 0
    quick_exit(status)
    sys.exit(status)


def quick_exit(status: int) -> None:
    """End this process without taking the interpreter apart; returns where a usual exit is needed.

    Once torch is loaded, Python takes more than a second to find and free all objects at exit,
    which the operating system does at once. Everything before that happens as always: threads are
    joined, functions of `atexit` run, output is flushed."""
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


if __name__ == "__main__":
    # Worker processes import this module too, and need nothing of the command line.
    program()
