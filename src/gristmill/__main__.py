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


if __name__ == "__main__":
    # Worker processes import this module too, and need nothing of the command line.
    main()
