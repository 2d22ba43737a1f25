"""Answers to proxies that ask before each request: auth_request of nginx, forward auth of Traefik and Caddy, HAProxy.

The proxy's configuration names the rule in the path. The query is ignored, because Caddy sends the client's: a client
that could name its key would have no limit. The key is made of the parts that the rule lists, and a value that a client
chose is never a reason for an error that a proxy may take for an outage: one that is too long is replaced by a digest.
"""

from __future__ import annotations

import logging
from time import perf_counter_ns
from typing import TYPE_CHECKING

from headgate.errors import InvalidKey
from headgate.keys import check_key, digest
from headgate.service.checks import take
from headgate.service.forwarded import UNREADABLE
from headgate.service.resolve import resolve_request
from headgate.service.responses import as_json, exempt_response
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.rules import CompiledRule
from headgate.service.settings import NAME
from headgate.web.problem import problem

if TYPE_CHECKING:
    from headgate.service.app import App, State

logger = logging.getLogger("headgate.service")

PREFIX = "/api/v1/rate-limit/forward/"
FORMS = f"{PREFIX}RULE, or {PREFIX}RULE/403 for a denial that nginx understands"


async def forward(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Spend one permit, whatever the method: 200 without a body, or a problem with the status 429 or 403."""
    began = perf_counter_ns()
    state = app.state
    state.tokens.demand("check", scope.headers)
    name, denied = parse_path(scope.path)
    if name not in state.rule_set.rules:  # clients may see this answer, so it names no other rule
        raise HTTPError(404, f"there is no rule {name!r}; the path is {FORMS}")
    _check_parts(state, scope, state.rule_set.get(name, None))
    rule, key, exempt = resolve_request(state, scope, name, None, None, UNREADABLE)
    try:
        check_key(key)
    except InvalidKey:  # too long, empty, a control character: an error might let the request pass
        key = f"~{digest(key)}"
    if exempt:
        response: Response | None = exempt_response(app, rule, key, perf_counter_ns() - began)
    else:
        response = await take(app, state, scope, protocol, rule, key, as_json(key), rule.cost, began)
    assert response is not None
    return _without_decision(response, denied)


def parse_path(path: str) -> tuple[str, int]:
    """The rule that *path* names, and the status of a denial."""
    name, slash, denied = path.removeprefix(PREFIX).partition("/")
    if not NAME.fullmatch(name):
        raise HTTPError(404, f"{name!r:.80} is no name of a rule; the path is {FORMS}")
    if slash and denied != "403":
        raise HTTPError(404, f"there is nothing at {path!r:.160}; the path is {FORMS}")
    return name, 403 if slash else 429


def _check_parts(state: State, scope: Scope, rule: CompiledRule) -> None:
    """Refuse a rule whose key the client would have to name, and warn of one key for all clients of a proxy."""
    if rule.key_parts is None or "key" in rule.key_parts:
        why = "has 'key' in its key, which no proxy can send: a client must not choose it"
        raise HTTPError(400, f'rule {rule.name!r} {why}; set key = ["address"] in the rule, or other parts')
    if "address" not in rule.key_parts or state.warned_of_proxy or state.client_ip.trusts(scope.client):
        return
    if any(header in scope.headers for header in state.settings.client_headers):
        state.warned_of_proxy = True
        why = "is not in trusted_proxies, so all clients behind it share the limits of its own address"
        logger.warning("The proxy %s %s", scope.client.rpartition(":")[0], why)


def _without_decision(response: Response, denied: int) -> Response:
    """The response to a check as a proxy wants it: the headers, and a body for clients that shows no key."""
    status, headers, _ = response
    kept = [header for header in headers if header[0] not in ("content-type", "cache-control")]
    if status == 200:
        return 200, [*kept, ("cache-control", "no-store")], b""
    seconds = dict(kept)["retry-after"]
    return problem(denied, f"Rate limit exceeded; try again in {seconds} s", *kept)
