"""`python -m headgate`: the same as the ``headgate`` command."""

from headgate.cli import main

main()
