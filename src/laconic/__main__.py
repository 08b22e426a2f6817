"""``python -m laconic``: the same as the ``laconic`` command."""

from laconic.cli import main

if __name__ == "__main__":
    main()
