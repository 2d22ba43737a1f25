"""Lines that are logged once for an event, not once for a call.

The audit log has one line for every reset and every change of the rules, on the logger `headgate.audit`. `OutageLog`
has one error line for each rule in each outage of the store.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headgate.service.files import LastGoodConfig
from headgate.service.resolve import KeyedRule
from headgate.service.rsgi import Scope
from headgate.stores.base import StoreHealth

if TYPE_CHECKING:
    from headgate.service.app import State
    from headgate.service.responses import CountedRule

audit_logger = logging.getLogger("headgate.audit")
logger = logging.getLogger("headgate.service")


def log_reset(state: State, scope: Scope, token_digest: bytes | None, rule: KeyedRule, key: str) -> None:
    """A client has reset *key*."""
    address = state.client_ip.address(scope.client, scope.headers)
    audit_logger.info(
        "Reset of key: %s, rule: %s, algorithm: %s, by %s from %s",
        state.show_key(key),
        rule.name,
        rule.label,
        state.tokens.describe(token_digest),
        address or scope.client,
    )


def short_hash(*values: object) -> str:
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()[:12]


def rules_hash(config: LastGoodConfig) -> str:
    """A short hash of all that decides: rules, plans and Envoy's rules, whatever their order in the file."""
    settings = config.settings
    return short_hash(settings.rules, settings.plans, settings.envoy, config.domains)


def log_rules(was: LastGoodConfig, now: LastGoodConfig, source: object, folder: Path) -> None:
    """The rules may have changed. Every worker calls this, and the first one writes the line."""
    old, new = rules_hash(was), rules_hash(now)
    if old == new:
        return
    try:
        (folder / f"audit-{old}-{new}-{short_hash(now.stamp)}").touch(exist_ok=False)
    except FileExistsError:
        return
    before, after = was.settings, now.settings
    added = [name for name in after.rules if name not in before.rules]
    removed = [name for name in before.rules if name not in after.rules]
    changed = [name for name, rule in after.rules.items() if name in before.rules and before.rules[name] != rule]
    if before.plans != after.plans:
        changed.append("the plans")
    if (before.envoy, was.domains) != (after.envoy, now.domains):
        changed.append("those of Envoy")
    parts = (("added", added), ("removed", removed), ("changed", changed))
    what = "; ".join(f"{word} {', '.join(names)}" for word, names in parts if names)
    audit_logger.info("Rules changed by %s: hash before %s, after %s: %s", source or "the environment", old, new, what)


class OutageLog:
    """Remembers which rules have had their line. The metrics say how many checks the store did not answer."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._recent: set[str] = set()  # rules with such a check since the last call of `end_second`

    def is_news(self, rule: str) -> bool:
        """A check of *rule* got no answer from the store: whether that is the first in this outage."""
        self._recent.add(rule)
        if rule in self._logged:
            return False
        self._logged.add(rule)
        return True

    def log(self, rule: CountedRule, key: str, reason: str) -> None:
        """Write the line; *key* as a log may show it."""
        text = "Error executing rate limit check for key: %s, rule: %s, on_store_error: %s: %s"
        logger.error(text, key, rule.name, rule.on_store_error, reason or "the store did not answer")

    def end_second(self, health: StoreHealth) -> None:
        """An outage is over for a rule when the store answers and the rule has had no such check for a second."""
        if health.state == "closed" and not health.failures:
            self._logged &= self._recent
        self._recent.clear()
