"""The ``headgate`` command. Each subcommand is a file here; what it needs is imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import headgate
from headgate.cli import config, serve, token


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="headgate", description="A distributed rate limiter.")
    build = "compiled" if headgate.COMPILED else "pure Python"
    parser.add_argument("--version", action="version", version=f"headgate {headgate.__version__} ({build})")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (serve, config, token):
        command.add(commands)
    options = parser.parse_args(argv)
    if not hasattr(options, "run"):
        parser.print_help()
        return
    try:
        sys.exit(options.run(options))
    except ImportError as error:
        sys.exit(f"headgate: {error}")
