"""`python -m gristmill` is `gristmill`."""

from gristmill.cli.main import main

main()
