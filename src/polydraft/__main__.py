"""`python -m polydraft` is the command line."""

from polydraft.cli.main import main

if __name__ == "__main__":
    main()
