"""`GET /live/rules`: the rules with what each decided in the last hour, and one rule as TOML to copy.

A reader sees quotas and the other fields of a rule. Overrides and exemptions name clients, as keys do, so only an admin
token sees them; tokens and the store's URL are no part of a rule.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.service.request import parse_query
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope, json_response
from headgate.service.rule_minutes import MINUTES, RuleHour, this_minute
from headgate.service.settings import DEFAULT_BUCKET, DEFAULT_WINDOW, THROTTLE_RULE, Quotas, RuleSettings, Settings

if TYPE_CHECKING:
    from headgate.service.app import App

SHOWN_RULES = 200  # in one answer, the busiest first; `find` narrows them down
NAMES_OF_CLIENTS = ("overrides", "exempt")


async def rules(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """The rules whose name has the text of `find`; or, with `rule`, that one and its settings."""
    app.state.tokens.demand("read", scope.headers)
    asked = parse_query(scope.query_string, frozenset({"find", "rule"}))
    if "rule" in asked:
        return json_response(_one(app, asked["rule"], app.state.tokens.allows("admin", scope.headers)))
    wanted = asked.get("find", "").lower()
    hours = hours_by_rule(app.minutes.hours(app.counters, this_minute()))
    known = {row["rule"]: row for row in app.state.rule_set.info()}
    for name in hours:
        if name == THROTTLE_RULE or name.startswith("envoy/"):
            known.setdefault(name, {"rule": name})
    found = [row for name, row in known.items() if wanted in name.lower()]
    found.sort(key=lambda row: -sum(map(sum, hours.get(row["rule"], ()))))
    shown = [row | _counts(hours.get(row["rule"])) for row in found[:SHOWN_RULES]]
    return json_response({"minutes": MINUTES, "rules": shown, "more": len(found) - len(shown)})


def _one(app: App, name: str, admin: bool) -> dict[str, Any]:
    rule = app.state.rule_set.rules.get(name)
    if rule is None:
        raise HTTPError(404, f"there is no rule {name!r:.80} in the settings")
    return {"rule": name, "toml": rule_as_toml(name, rule, app.state.settings, admin)}


def _counts(hour: RuleHour | None) -> dict[str, Any]:
    if hour is None:
        return {"allowed": 0, "denied": 0}
    by_minute = {"allowed": hour.allowed, "denied": hour.denied}
    return {"allowed": sum(hour.allowed), "denied": sum(hour.denied), "perMinute": by_minute}


def hours_by_rule(slots: dict[str, RuleHour]) -> dict[str, RuleHour]:
    """The hour of each rule, its algorithms added up."""
    found: dict[str, RuleHour] = {}
    for slot, hour in slots.items():
        name = slot.rpartition(" ")[0]
        before = found.get(name)
        found[name] = hour if before is None else RuleHour(*map(_add, before, hour))
    return found


def _add(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


# ------------------------------------------------------------------------------------------------------------- as TOML


def rule_as_toml(name: str, rule: RuleSettings, settings: Settings, admin: bool) -> str:
    """*rule* as it could stand in the file, with the plans that it names; without clients' names unless *admin*."""
    fields: dict[str, Any] = msgspec.to_builtins(rule)
    if fields.get("key") == ["key"]:
        del fields["key"]  # the default
    if rule.quotas is None and rule.concurrency is None:
        fields = {"quotas": {"bucket": DEFAULT_BUCKET, "window": DEFAULT_WINDOW}} | fields
    clients = {field: fields.pop(field) for field in NAMES_OF_CLIENTS if field in fields}
    lines = [f"[rules.{_name(name)}]"]
    lines += [f"{field} = {_value(value)}" for field, value in fields.items()]
    if not admin:
        left_out = " and ".join(f"{len(entries)} of {field}" for field, entries in clients.items())
        return "\n".join([*lines, *([f"# left out without an admin token: {left_out}"] if clients else [])]) + "\n"
    if "exempt" in clients:
        lines.append(f"exempt = {_value(clients['exempt'])}")
    overrides: dict[str, Quotas] = clients.get("overrides", {})
    if overrides:
        lines += ["", f"[rules.{_name(name)}.overrides]"]
        lines += [f"{_name(key)} = {_value(quotas)}" for key, quotas in overrides.items()]
    named = {text for text in overrides.values() if isinstance(text, str)}
    plans = {plan: quotas for plan, quotas in settings.plans.items() if plan in named}
    if plans:
        lines += ["", "[plans]", *(f"{_name(plan)} = {_value(quotas)}" for plan, quotas in plans.items())]
    return "\n".join(lines) + "\n"


def _name(text: str) -> str:
    return text if re.fullmatch("[A-Za-z0-9_-]+", text) else _text(text)


def _text(text: str) -> str:
    """A string of TOML is one of JSON, except that TOML wants DEL to be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_name(name)} = {_value(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _text(value) if isinstance(value, str) else json.dumps(value)
