"""The commands of the service: headgate serve, headgate config, headgate token.

The service is imported when a command runs, so that `headgate --help` works without its packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import signal
import sys
from typing import Any

BAD_SETTINGS = 5
SERVE = (
    "Serve HTTP. What is not said here is taken from the environment (HEADGATE_PORT, HEADGATE_STORE, ...), then from "
    "the file, which `headgate config schema` describes. The running service describes its API at /docs."
)


def refuse(reason: object, code: int) -> int:
    """Say on standard error why a command ends, and return its exit code."""
    print(f"headgate: {reason}", file=sys.stderr)
    return code


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Let a command print *what* it has found as JSON."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve HTTP", description=SERVE)
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8080; 0 takes a free one)")
    parser.add_argument("--resp-port", type=int, help="port for the Redis protocol (default: none; 0 takes a free one)")
    parser.add_argument("--grpc-port", type=int, help="port for Envoy's rate-limit service (default: none)")
    parser.add_argument(
        "--store", help="memory:// (the default), shared://name, redis://host:port/db, postgresql://, ..."
    )
    parser.add_argument(
        "--client-limits",
        type=int,
        metavar="N",
        help="limits that clients may bring along, with headgate:// (default 0)",
    )
    parser.add_argument(
        "--client-limits-hybrid",
        action="store_true",
        default=None,
        help="decide them from leases on Redis or PostgreSQL, most checks without a round trip to it",
    )
    parser.add_argument("--config", metavar="FILE", help="rules and settings (default headgate.toml, if it is there)")
    parser.add_argument("--workers", type=int, help="processes (default 1)")
    parser.add_argument(
        "--log-level", type=str.lower, choices=["debug", "info", "warning", "error"], help="default info"
    )
    parser.add_argument("--log-format", type=str.lower, choices=["text", "json"], help="default text")
    parser.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> int:
    if hasattr(signal, "SIGHUP"):
        # the default action ends the process; the service sets a handler of its own later
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from headgate.service.files import sources
    from headgate.service.server import serve as run_service
    from headgate.service.settings import PORTS, BadFile

    names = ("host", *PORTS, "store", "client_limits", "client_limits_hybrid", "workers")
    given = {name: getattr(options, name) for name in (*names, "log_level", "log_format")}
    try:
        run_service(sources(options.config, given))
    except BadFile as error:
        return refuse(error, BAD_SETTINGS)
    except OSError as error:
        return refuse(f"cannot listen on {error}", 1)
    return 0


def add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="validate, show or describe settings")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, text in (
        ("validate", validate_config, "say whether the settings can be used; exit code 0 or 5"),
        ("show", show_config, "print the settings that would be in force, as JSON, without secrets"),
        ("schema", print_schema, "print the JSON Schema of the file, for editors"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=run)
        if name != "schema":
            action.add_argument("file", nargs="?", help="default: HEADGATE_CONFIG, or headgate.toml if it is there")
            action.add_argument("--config", metavar="FILE", help="the same")


def validate_config(options: argparse.Namespace) -> int:
    from headgate.service.certificates import check_tls
    from headgate.service.files import sources
    from headgate.service.settings import BadFile
    from headgate.service.store import check_store

    found = sources(options.file or options.config, {})
    try:
        settings = found.read()
        domains = len(found.envoy_domains(settings))
        found.tokens(settings)
        check_store(settings)
        check_tls(settings.tls)
    except BadFile as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS
    _warn(found.warnings())
    rules = len(settings.rules)
    envoy = f", {domains} domain{'' if domains == 1 else 's'} of Envoy" if domains else ""
    print(f"{found.file or 'no file'}: fine, {rules} rule{'' if rules == 1 else 's'}{envoy}")
    return 0


def show_config(options: argparse.Namespace) -> int:
    from headgate.service.files import sources  # before msgspec: its error says which extra is missing
    from headgate.service.server import redacted
    from headgate.service.settings import BadFile

    import msgspec  # isort: skip

    found = sources(options.file or options.config, {})
    try:
        settings = found.read()
        tokens = found.tokens(settings)
    except BadFile as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS
    _warn(found.warnings())
    shown = msgspec.structs.asdict(settings)
    shown["store"] = redacted(settings.store)
    shown["tls"] = settings.tls and msgspec.structs.asdict(settings.tls)
    shown["tokens"] = [{"scope": scope, "sha256": digest[:8] + "..."} for digest, scope in tokens]
    shown["envoy"] = msgspec.to_builtins(settings.envoy)
    shown["rules"] = {name: msgspec.structs.asdict(rule) for name, rule in settings.rules.items()}
    print(json.dumps(shown, indent=2, ensure_ascii=False, default=msgspec.structs.asdict))
    return 0


def print_schema(options: argparse.Namespace) -> int:
    from headgate.service.settings import Settings

    import msgspec  # isort: skip

    print(json.dumps(msgspec.json.schema(Settings), indent=2))
    return 0


def _warn(texts: list[str]) -> None:
    for text in texts:
        print(f"headgate: {text}", file=sys.stderr)


def add_token(commands: Any) -> None:
    text = "print a new random token, and the SHA-256 of it that goes into the file"
    commands.add_parser("token", help=text, description=text).set_defaults(run=new_token)


def new_token(options: argparse.Namespace) -> int:
    token = secrets.token_hex(32)  # of no character that a shell or an option parser could take for its own
    print(f"token   {token}\nsha256  {hashlib.sha256(token.encode()).hexdigest()}")
    return 0
