"""From a request to the rule and the key that it is about; `KeyedRule` is what every rule has, whatever it limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from headgate.errors import InvalidKey
from headgate.keys import check_key
from headgate.service.forwarded import PARTS, forwarded_part
from headgate.service.rsgi import HTTPError, RequestHeaders, Scope
from headgate.service.settings import RuleSettings
from headgate.service.shared_counters import KINDS, SLOT_WORDS, TIMING_WORDS
from headgate.web.client_ip import ClientIP, IPAddress, IPNetwork, in_networks, parse_network

if TYPE_CHECKING:
    from headgate.service.app import State
    from headgate.service.concurrency_rules import ConcurrencyRule
    from headgate.service.rules import CompiledRule

AnyRule = TypeVar("AnyRule", "CompiledRule", "ConcurrencyRule")


class KeyedRule:
    """A rule as a request meets it; *slot* is that of its counters, *kind* the algorithm, or `concurrency`."""

    __slots__ = (
        "exempt_keys",
        "exempt_networks",
        "json_end",
        "key_only",
        "key_parts",
        "label",
        "name",
        "on_store_error",
        "shadow",
        "slot",
        "timing",
    )

    def __init__(self, name: str, kind: str, settings: RuleSettings, slot: int) -> None:
        self.name = name
        self.label = kind.upper()
        self.on_store_error = settings.on_store_error
        self.shadow = settings.shadow
        self.json_end = "}" if name == "default" else f',"rule":"{name}"}}'
        self.key_parts = None if settings.key == ["key"] else [part.lower() for part in settings.key]
        networks = [found for text in settings.exempt if (found := _network(text))]
        self.exempt_networks: Sequence[IPNetwork] | None = networks or None
        self.exempt_keys = frozenset(settings.exempt) or None
        self.key_only = self.key_parts is None and self.exempt_keys is None  # the key alone decides
        self.slot = slot * SLOT_WORDS
        # where the times of denied checks begin; those of allowed checks follow
        self.timing = 2 * KINDS.index(kind) * TIMING_WORDS

    def is_exempt(self, key: str, address: Callable[[], IPAddress | None]) -> bool:
        """Whether *key*, or the client that sends it, is always allowed."""
        if self.exempt_keys is not None and key in self.exempt_keys:
            return True
        client = address() if self.exempt_networks is not None else None
        return client is not None and in_networks(client, self.exempt_networks or ())


def _network(text: str) -> IPNetwork | None:
    try:
        return parse_network(text)
    except ValueError:
        return None  # a key


def is_unreadable(headers: RequestHeaders, name: str) -> bool:
    """Whether a header is there whose value granian does not give, because it is not ASCII."""
    return not headers.get_all(name) and name in headers


class RequestClientIP(ClientIP):
    """Finds the client of a request.

    If a trusted proxy sends a header that cannot be read, the client has no address: the proxy's own would be wrong.
    """

    def address(self, peer: str, headers: RequestHeaders) -> IPAddress | None:  # type: ignore[override]  # granian's
        """The client's address; None if it is not known."""
        for name in self.headers if self.trusts(peer) else ():
            if headers.get_all(name):
                break
            if name in headers:
                return None
        return super().address(peer, headers)


def resolve_request(
    state: State,
    scope: Scope,
    rule_name: str | None,
    algorithm: str | None,
    given_key: str | None,
    unreadable: str = "",
) -> tuple[CompiledRule, str, bool]:
    """The rule and the key of a request, and whether it is exempt.

    *unreadable* stands for a header of the key that cannot be read; without it that is an error.
    """
    return _resolved(state, scope, state.rule_set.get(rule_name, algorithm), given_key, unreadable)


def resolve_slots(
    state: State, scope: Scope, rule_name: str | None, given_key: str | None
) -> tuple[ConcurrencyRule, str, bool]:
    """The same for a request about slots. The key is checked."""
    found = _resolved(state, scope, state.rule_set.concurrency(rule_name), given_key)
    try:
        check_key(found[1])
    except InvalidKey as error:
        raise HTTPError(400, str(error)) from None
    return found


def _resolved(
    state: State, scope: Scope, rule: AnyRule, given_key: str | None, unreadable: str = ""
) -> tuple[AnyRule, str, bool]:
    key = _key(state, scope, rule, given_key, unreadable)
    if rule.exempt_keys is not None and rule.is_exempt(key, _address(state, scope)):
        return rule, key, True
    if rule.overrides is not None:
        rule = rule.overrides.get(key, rule)
    return rule, key, False


def keys_to_reset(
    state: State, scope: Scope, rule_name: str | None, algorithm: str | None, given_key: str | None
) -> list[tuple[CompiledRule, str]]:
    """The rules and keys that a reset is about; the response shows the first.

    Under a rule that joins parts, *given_key* may be the key of a check, with the other parts as this client would
    send them, or a joined key as responses show it. If it could be either, both are reset: the client cannot see
    which of the two a 200 was about.
    """
    return _keys_to_reset(state, scope, state.rule_set.get(rule_name, algorithm), given_key)


def slots_to_reset(
    state: State, scope: Scope, rule_name: str, given_key: str | None
) -> list[tuple[ConcurrencyRule, str]]:
    """The same for a rule that limits concurrency."""
    return _keys_to_reset(state, scope, state.rule_set.concurrency(rule_name), given_key)


def _keys_to_reset(state: State, scope: Scope, rule: AnyRule, given_key: str | None) -> list[tuple[AnyRule, str]]:
    parts = len(rule.key_parts or ())
    keys = []
    try:
        if given_key is not None and (parts == 1 or given_key.count("|") == parts - 1):
            keys.append(check_key(given_key))
        keys.append(check_key(_key(state, scope, rule, given_key)))
    except (InvalidKey, HTTPError) as error:
        if not keys:
            more = "" if rule.key_parts is None else "; or give the key as answers show it"
            raise HTTPError(400, f"{error}{more}") from None
    return [(rule.overrides.get(key, rule) if rule.overrides else rule, key) for key in dict.fromkeys(keys)]


def _key(state: State, scope: Scope, rule: KeyedRule, given_key: str | None, unreadable: str = "") -> str:
    if rule.key_parts is not None:
        return _joined_key(state, scope, rule, given_key, unreadable)
    return state.client_ip.key(scope.client, scope.headers) if given_key is None else given_key


def _address(state: State, scope: Scope) -> Callable[[], IPAddress | None]:
    return lambda: state.client_ip.address(scope.client, scope.headers)


def _joined_key(state: State, scope: Scope, rule: KeyedRule, given_key: str | None, unreadable: str) -> str:
    """The key of a rule with several parts, joined with `|`; a `|` inside a part is percent-encoded."""
    values = []
    for part in rule.key_parts or ():
        if part == "key":
            value = state.client_ip.key(scope.client, scope.headers) if given_key is None else given_key
        elif part == "address":
            value = state.client_ip.key(scope.client, scope.headers)
        elif part in PARTS:
            value = forwarded_part(state, scope, rule.name, part)
        else:
            name = part.removeprefix("header:")
            value = unreadable if is_unreadable(scope.headers, name) else scope.headers.get(name, "")
            if not value:
                raise HTTPError(400, f"rule {rule.name!r} needs the header {name}")
        values.append(value)
    if len(values) == 1:
        return str(values[0])
    return "|".join(value.replace("%", "%25").replace("|", "%7C") for value in values)
