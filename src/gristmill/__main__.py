"""The program `gristmill`, also `python -m gristmill`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. The commands take a moment to import, and a signal may arrive then."""
    if sys.argv[1:2] == ["train"]:
        from gristmill.base.signals import exit_on_stop_signals

        exit_on_stop_signals()
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
    from gristmill.base.quick_exit import quick_exit

    quick_exit(status)
    sys.exit(status)


if __name__ == "__main__":
    # Worker processes import this module too, and need nothing of the command line.
    program()
