"""headgate serve: run the service."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

BAD_SETTINGS = 5
TEXT = (
    "Serve HTTP. What is not said here is taken from the environment (HEADGATE_PORT, HEADGATE_STORE, ...), then from "
    "the file, which `headgate config schema` describes. The running service describes its API at /docs."
)


def add(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve HTTP", description=TEXT)
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8080; 0 takes a free one)")
    parser.add_argument("--store", help="memory:// (the default), redis://host:port/db, ...")
    parser.add_argument("--config", metavar="FILE", help="rules and settings (default headgate.toml, if it is there)")
    parser.add_argument("--workers", type=int, help="processes (default 1)")
    parser.add_argument(
        "--log-level", type=str.lower, choices=["debug", "info", "warning", "error"], help="default info"
    )
    parser.add_argument("--log-format", type=str.lower, choices=["text", "json"], help="default text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if hasattr(signal, "SIGHUP"):
        signal.signal(
            signal.SIGHUP, signal.SIG_IGN
        )  # its default action ends the process; the service sets its own handler
    from headgate.service.files import sources
    from headgate.service.server import serve
    from headgate.service.settings import BadFile

    names = ("host", "port", "store", "workers", "log_level", "log_format")
    given = {name: getattr(options, name) for name in names}
    try:
        serve(sources(options.config, given))
    except BadFile as error:
        print(f"headgate: {error}", file=sys.stderr)
        return BAD_SETTINGS
    except OSError as error:
        print(f"headgate: cannot listen on {error}", file=sys.stderr)
        return 1
    return 0
