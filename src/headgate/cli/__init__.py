"""The ``headgate`` command. Its subcommands import the service only when they run.

service.py  the commands of the service: serve, config, token; how every command refuses, and its option --json
replay.py   headgate replay and headgate plan: what limits would do, and what new settings change
inspect.py  headgate migrate, doctor and top: the tables of a store, whether it is fit, and what a service does
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import headgate
from headgate.cli.inspect import add_doctor, add_migrate, add_top
from headgate.cli.replay import add_plan, add_replay
from headgate.cli.service import add_config, add_serve, add_token

BROKEN_PIPE = 141  # the exit code that a shell shows for a program that SIGPIPE ended


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown arguments itself: argparse leaves that to the top parser, which shows the wrong usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return found, unknown

    def _hint(self, word: str) -> str:
        if not word.startswith("-"):
            return f"; a file of settings is given as --config {word}" if self.prog.endswith(" serve") else ""
        near = get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
        return f"; did you mean {near[0]}?" if near else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        try:
            sys.exit(_run(argv))
        finally:
            print(end="", flush=True)  # here, so that a broken pipe is caught below
    except ImportError as error:
        sys.exit(f"headgate: {error}")
    except BrokenPipeError:  # headgate config schema | head
        # Python would flush standard output again at exit, and print an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="headgate", description="A distributed rate limiter.")
    build = "compiled" if headgate.COMPILED else "pure Python"
    parser.add_argument("--version", action="version", version=f"headgate {headgate.__version__} ({build})")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (add_serve, add_config, add_token, add_migrate, add_replay, add_plan, add_doctor, add_top):
        add(commands)
    options = parser.parse_args(argv)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    code: int = options.run(options)
    return code
