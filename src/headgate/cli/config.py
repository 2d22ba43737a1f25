"""headgate config: validate, show or describe settings without starting the service."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from headgate.cli.serve import BAD_SETTINGS


def add(commands: Any) -> None:
    parser = commands.add_parser("config", help="validate, show or describe settings")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, text in (
        ("validate", validate, "say whether the settings can be used; exit code 0 or 5"),
        ("show", show, "print the settings that would be in force, as JSON, without secrets"),
        ("schema", schema, "print the JSON Schema of the file, for editors"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=run)
        if name != "schema":
            action.add_argument("file", nargs="?", help="default: HEADGATE_CONFIG, or headgate.toml if it is there")
            action.add_argument("--config", metavar="FILE", help="the same")


def validate(options: argparse.Namespace) -> int:
    from headgate.service.files import sources
    from headgate.service.server import check_store
    from headgate.service.settings import BadFile

    found = sources(options.file or options.config, {})
    try:
        settings = found.read()
        found.tokens(settings)
        check_store(settings)
    except BadFile as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS
    _warn(found.warnings())
    rules = len(settings.rules)
    print(f"{found.file or 'no file'}: fine, {rules} rule{'' if rules == 1 else 's'}")
    return 0


def show(options: argparse.Namespace) -> int:
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
    shown["tokens"] = [{"scope": scope, "sha256": digest[:8] + "..."} for digest, scope in tokens]
    shown["rules"] = {name: msgspec.structs.asdict(rule) for name, rule in settings.rules.items()}
    print(json.dumps(shown, indent=2, ensure_ascii=False))
    return 0


def schema(options: argparse.Namespace) -> int:
    from headgate.service.settings import Settings

    import msgspec  # isort: skip

    print(json.dumps(msgspec.json.schema(Settings), indent=2))
    return 0


def _warn(texts: list[str]) -> None:
    for text in texts:
        print(f"headgate: {text}", file=sys.stderr)
