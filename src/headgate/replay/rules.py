"""Which limit holds for a key: the quotas of the command line, or a rule of a settings file with its overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from headgate.algorithms.algorithm import Algorithm
from headgate.errors import InvalidQuota
from headgate.quota import Quota
from headgate.rule import Quotas, Rule


class ReplayRule:
    """One limit to try: *rule* for most keys, others for some, and keys that are exempt."""

    def __init__(
        self,
        rule: Rule,
        label: str = "",
        overrides: Mapping[str, Rule] | None = None,
        exempt: Sequence[str] = (),
        cost: int = 1,
    ) -> None:
        self.rule = rule
        self.label = label or f"{', '.join(map(str, rule.quotas))} ({rule.kind})"
        self.cost = cost
        self._overrides = overrides or {}
        self._exempt = frozenset(exempt)
        self._networks = [network for text in exempt if (network := _network(text))]

    def algorithms(self, names: Sequence[str]) -> list[Algorithm[Any] | None]:
        """The algorithm that decides about each of the keys; None for one that is exempt."""
        found: list[Algorithm[Any] | None] = [self.rule.algorithm] * len(names)
        if self._overrides or self._exempt:
            for number, name in enumerate(names):
                if name in self._exempt or self._is_in_network(name):
                    found[number] = None
                elif name in self._overrides:
                    found[number] = self._overrides[name].algorithm
        return found

    def _is_in_network(self, name: str) -> bool:
        if not self._networks:
            return False
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def rule_of_quotas(quotas: Quotas, algorithm: str = "token_bucket") -> ReplayRule:
    """The limit that quotas on the command line mean."""
    return ReplayRule(Rule(quotas, algorithm))


def rule_of_file(path: Path, name: str) -> ReplayRule:
    """The rule of a settings file; raises `ValueError` if there is none of that name, or one without quotas."""
    from headgate.service.files import read_file
    from headgate.service.settings import quota_overrides, quotas_for, resolve_plan

    settings = read_file(path)
    known = settings.rules.get(name)
    if known is None:
        rules = ", ".join(settings.rules) or "none"
        raise ValueError(f"{path} has no rule {name!r:.80}; it has {rules}: choose one with --rule")
    if known.concurrency is not None:
        raise ValueError(
            f"the rule {name!r} of {path} has slots and no quotas: a log does not say how long they were held"
        )
    kind = known.algorithm.lower()
    overrides = {
        key: Rule(resolve_plan(quotas, settings.plans), kind) for key, quotas in quota_overrides(known).items()
    }
    rule = Rule(quotas_for(name, known, kind), kind)
    label = f"{name} of {path}: {', '.join(map(str, rule.quotas))} ({rule.kind})"
    return ReplayRule(rule, label, overrides, known.exempt, known.cost)


def rule_of_text(text: str, name: str, algorithm: str) -> ReplayRule:
    """The limit that *text* names: a settings file if there is one of that name, else a quota."""
    if Path(text).is_file():
        return rule_of_file(Path(text), name)
    try:
        return rule_of_quotas(Quota.parse(text), algorithm)
    except InvalidQuota as error:
        raise ValueError(f"{text!r:.80} is no file, and no quota: {error}") from None


def _network(text: str) -> Any:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None
