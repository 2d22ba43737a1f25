"""headgate replay and headgate plan: what a limit would have done to a log, and what new settings change.

Exit codes: 0, 1 for a log that cannot be read, 3 where --fail-if holds or a plan is tighter, 5 for bad settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.cli.service import BAD_SETTINGS, add_json, refuse

if TYPE_CHECKING:
    from headgate.replay.rules import ReplayRule

CONDITION_HOLDS = 3
REPLAY = (
    "Replay an access log against a limit, and say which keys it would have refused, when and for how long. "
    "Formats: combined (nginx, Apache), JSON lines and CSV with a header; gzip is unpacked, - is standard input."
)
PLAN = (
    "Compare two settings files: which rules become tighter or looser, or count by another key. Exit code 3 if a rule "
    "is tighter, counts by another key or is gone."
)


class Asked(NamedTuple):
    """What `headgate replay` is to try: a limit, the limit of today, the share of keys of --suggest."""

    new: ReplayRule | None
    old: ReplayRule | None
    share: float | None
    algorithm: str


def add_replay(commands: Any) -> None:
    parser = commands.add_parser("replay", help="what a limit would have done to a log", description=REPLAY)
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="a file; several are one log")
    parser.add_argument("--quota", action="append", help="the limit, such as '100/minute'; several must all allow")
    parser.add_argument("--algorithm", default="token_bucket", help="of --quota and --suggest (default token_bucket)")
    parser.add_argument("--config", metavar="FILE", help="take the limit from a settings file instead")
    parser.add_argument("--rule", default="default", help="the rule of the settings files (default: default)")
    parser.add_argument("--against", metavar="OLD", help="the limit of today: a settings file or a quota")
    parser.add_argument("--key", help="a field of a line, or a template such as '{user}:{path}' (default: the address)")
    parser.add_argument("--time", metavar="FIELD", help="the field with the time, in JSON and CSV")
    parser.add_argument("--format", choices=["combined", "json", "csv"], help="default: as the first line looks")
    parser.add_argument(
        "--suggest",
        metavar="SHARE",
        nargs="?",
        const="1%",
        help="the least quota that refuses so many keys (default 1%%)",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report as a page with a picture")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write the picture alone")
    parser.add_argument("--fail-if", action="append", default=[], metavar="CONDITION", help="such as 'denied > 0.1%%'")
    add_json(parser, "the report")
    parser.set_defaults(run=replay)


def replay(options: argparse.Namespace) -> int:
    try:
        asked = _asked(options)
    except ValueError as error:
        return refuse(error, BAD_SETTINGS)
    from headgate.quota import Quota
    from headgate.replay.decide import replay as decide_all
    from headgate.replay.logs import BadLog, LineReader
    from headgate.replay.picture import as_html, as_svg
    from headgate.replay.report import as_text, holds, report
    from headgate.replay.suggest import suggest
    from headgate.replay.traffic import read_traffic

    try:
        traffic = read_traffic(options.logs, LineReader(options.format, options.key, options.time), _show_progress())
    except (BadLog, OSError) as error:
        return refuse(error, 1)
    if not len(traffic) and not traffic.skipped:
        return refuse("the log is empty", 1)
    if not len(traffic):
        return refuse(f"none of the {traffic.skipped.total():,} lines is a request with {_wanted(options)}", 1)
    given = Quota.parse(options.quota[0]) if options.quota and len(options.quota) == 1 else None
    suggestions = [] if asked.share is None else suggest(traffic, asked.share, asked.algorithm, given)
    new_outcome, old_outcome = (None if each is None else decide_all(traffic, each) for each in (asked.new, asked.old))
    found = report(traffic, new_outcome, old_outcome, suggestions)
    try:
        if options.svg:
            options.svg.write_text(as_svg(found), encoding="utf-8")
        if options.html:
            options.html.write_text(as_html(found, as_text(found)), encoding="utf-8")
    except OSError as error:
        return refuse(error, 1)
    print(json.dumps(found, indent=2) if options.json else "\n".join(as_text(found)))
    failed = [condition for condition in options.fail_if if holds(condition, found)]
    for condition in failed:
        print(f"headgate: {condition} holds", file=sys.stderr)
    return CONDITION_HOLDS if failed else 0


def _asked(options: argparse.Namespace) -> Asked:
    """The limits that the options name; raises ValueError for options that do not go together."""
    from headgate.replay.report import check_condition
    from headgate.replay.rules import rule_of_file, rule_of_quotas, rule_of_text
    from headgate.rule import check_algorithm

    if options.quota and options.config:
        raise ValueError("give --quota or --config, not both")
    if not (options.quota or options.config or options.suggest):
        raise ValueError("say what to try: --quota '100/minute', --config FILE or --suggest")
    algorithm = check_algorithm(options.algorithm)
    new = rule_of_file(Path(options.config), options.rule) if options.config else None
    new = rule_of_quotas(options.quota, algorithm) if options.quota else new
    old = rule_of_text(options.against, options.rule, algorithm) if options.against else None
    share = None if options.suggest is None else _share(options.suggest)
    if new is None and (options.fail_if or options.html or options.svg or old):
        raise ValueError("--against, --fail-if, --html and --svg need a limit: --quota or --config")
    for path in filter(None, (options.html, options.svg)):  # before a large log is read
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    for condition in options.fail_if:
        check_condition(condition)
        if "new_denied" in condition and old is None:
            raise ValueError("new_denied needs --against: what the old limit refused")
    return Asked(new, old, share, algorithm)


def _wanted(options: argparse.Namespace) -> str:
    """What each line of the log was asked for."""
    time = f"a time in {options.time!r}" if options.time else "a time"
    return f"{time} and a key in {options.key!r}" if options.key else f"{time} and a key"


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"--suggest takes a share of the keys, such as 1% or 0.01, got {text!r:.40}")
    return share


def _show_progress() -> Any:
    if not sys.stderr.isatty():
        return lambda count: None
    return lambda count: print(f"\r{count:,} lines", end="\r", file=sys.stderr, flush=True)


def add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="what new settings change", description=PLAN)
    parser.add_argument("old", metavar="OLD", type=Path, help="the settings file of today")
    parser.add_argument("new", metavar="NEW", type=Path, help="the one to come")
    add_json(parser, "the changes")
    parser.set_defaults(run=plan)


def plan(options: argparse.Namespace) -> int:
    from headgate.inspection.plan import changes, worries
    from headgate.service.files import read_file
    from headgate.service.settings import BadFile

    try:
        found = changes(read_file(options.old), read_file(options.new))
    except (BadFile, ValueError) as error:
        return refuse(error, BAD_SETTINGS)
    if options.json:
        print(json.dumps([change.as_dict() for change in found], indent=2))
    else:
        print("\n".join(map(str, found)) or "nothing changes")
    return CONDITION_HOLDS if worries(found) else 0
