"""The ``headgate`` command."""

from __future__ import annotations

import argparse

import headgate


def main() -> None:
    """Run the command line. The service and its tools will hang their commands here."""
    parser = argparse.ArgumentParser(prog="headgate", description="A distributed rate limiter.")
    build = "compiled" if headgate.COMPILED else "pure Python"
    parser.add_argument("--version", action="version", version=f"headgate {headgate.__version__} ({build})")
    parser.parse_args()
    parser.print_help()
