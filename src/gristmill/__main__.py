"""`python -m gristmill`."""

if __name__ == "__main__":
    # Worker processes import this module too, and need nothing of the command line.
    from gristmill.cli.main import main

    main()
