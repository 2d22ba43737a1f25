"""What the settings say about the gRPC port and Envoy's rate limits, the types of its YAML, the names of its rules.

A rule is named by its domain and by the way to it: `shop/route=/login|ip` is the child `ip` of the descriptor `route`
with the value `/login` in the domain `shop`. Metrics show that name, and `[envoy.rules]` takes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headgate.algorithms import ALGORITHMS
from headgate.keys import MAX_BYTES, digest
from headgate.quota import Quota
from headgate.rule import Rule

Counting = Literal["all_or_nothing", "each"]
UNITS = {"second": 1, "minute": 2, "hour": 3, "day": 4, "month": 5, "year": 6, "week": 7}  # numbers in Envoy's enum
_DAY = 86_400
SECONDS = {1: 1, 2: 60, 3: 3600, 4: _DAY, 5: 30 * _DAY, 6: 365 * _DAY, 7: 7 * _DAY}  # in each unit
MAX_COUNT = 1_000_000_000  # the most that a quota of headgate counts

_Quotas = str | list[str]


class GrpcSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Connections of the gRPC port. A reload counts for open ones too."""

    max_connection_age: Annotated[
        float,
        Meta(ge=0, le=365 * _DAY, description="seconds, 10 % more or less; then the client connects anew; 0: no limit"),
    ] = 1800.0
    max_connection_age_grace: Annotated[
        float, Meta(ge=1, le=_DAY, description="seconds that calls get to end once their connection is to be closed")
    ] = 30.0


class EnvoyRuleSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What one rule of the YAML does otherwise; or, under the name of a domain alone, all of its rules."""

    algorithm: Annotated[str, Meta(description="token_bucket, ..., in any case; that of [envoy] if left out")] = ""
    quotas: Annotated[_Quotas | None, Meta(description="in place of requests_per_unit and unit")] = None
    drain: Annotated[bool | None, Meta(description="a charge above what remains takes what remains")] = None


class EnvoySettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Rate limits for Envoy, in the YAML of envoyproxy/ratelimit."""

    files: Annotated[list[str], Meta(description="names and patterns, from the folder of this file")] = []
    counting: Annotated[Counting, Meta(description="each: a descriptor counts also when another is over")] = (
        "all_or_nothing"
    )
    algorithm: Annotated[str, Meta(description="of all rules that [envoy.rules] does not name")] = "fixed_window"
    on_store_error: Literal["allow", "deny", "local", "raise"] = "allow"
    headers: Annotated[bool, Meta(description="RateLimit-* for the client, and Retry-After when over")] = False
    shadow: Annotated[bool, Meta(description="every rule decides and counts, and allows")] = False
    merge_domains: Annotated[bool, Meta(description="several files may have rules of one domain")] = False
    rules: dict[str, EnvoyRuleSettings] = {}


def grpc_problems(grpc: GrpcSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """What the types allow of [grpc] and the service cannot use, as `problems` says it of [envoy]."""
    if 0 < grpc.max_connection_age < 1:
        why = f"{grpc.max_connection_age:g} seconds would be spent on connecting; give at least 1, or 0 for no limit"
        yield ("max_connection_age",), why


def problems(envoy: EnvoySettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """What the types allow and the service cannot use: the path of each setting, and what would be right."""
    known = ", ".join(ALGORITHMS)
    if envoy.algorithm.lower() not in ALGORITHMS:
        yield ("algorithm",), f"unknown algorithm {envoy.algorithm!r:.40}; use one of {known}"
        return
    for name, rule in envoy.rules.items():
        algorithm = (rule.algorithm or envoy.algorithm).lower()
        if algorithm not in ALGORITHMS:
            yield ("rules", name, "algorithm"), f"unknown algorithm {rule.algorithm!r:.40}; use one of {known}"
        elif rule.quotas is not None:
            try:
                Rule(rule.quotas, algorithm)
            except ValueError as error:
                yield ("rules", name, "quotas"), str(error)


# -------------------------------------------------------------------------------------------- the YAML, as it was read


class EnvoyLimit(msgspec.Struct, omit_defaults=True):
    """The `rate_limit` of a descriptor; *unit* is its number in Envoy's enum, 0 if it is unlimited."""

    requests_per_unit: int = 0
    unit: int = 0
    unlimited: bool = False
    name: str = ""
    replaces: list[str] = []


class EnvoyDescriptor(msgspec.Struct, omit_defaults=True):
    """A descriptor and its children."""

    key: str
    value: str = ""
    rate_limit: EnvoyLimit | None = None
    shadow_mode: bool = False
    quota_mode: bool = False
    detailed_metric: bool = False
    value_to_metric: bool = False
    share_threshold: bool = False
    descriptors: list[EnvoyDescriptor] = []


class EnvoyDomain(msgspec.Struct, omit_defaults=True):
    """All descriptors of a domain, from one file or, merged, from several."""

    domain: str
    descriptors: list[EnvoyDescriptor] = []


# --------------------------------------------------------------------------------------------------- names and limits

_IN_VALUE = re.compile("[%|\x00-\x1f\x7f-\x9f]")
_IN_KEY = re.compile("[%|=\x00-\x1f\x7f-\x9f]")
_IN_DOMAIN = re.compile("[%|/\x00-\x1f\x7f-\x9f]")


def entry_text(key: str, value: str | None) -> str:
    """`key=value`, or `key` for any value; what would be ambiguous is percent-encoded."""
    if _IN_KEY.search(key):
        key = _IN_KEY.sub(_encoded, key)
    if value is None:
        return key
    return f"{key}={_IN_VALUE.sub(_encoded, value) if _IN_VALUE.search(value) else value}"


def domain_text(domain: str) -> str:
    return _IN_DOMAIN.sub(_encoded, domain)


def bounded(text: str) -> str:
    """*text*, or a digest if it is too long for a key; no other text is a digest, as those have no `=` and no `/`."""
    size = len(text) if text.isascii() else len(text.encode())
    return text if size <= MAX_BYTES else digest(text)


def rule_names(domain: str, descriptors: list[EnvoyDescriptor], way: str = "") -> Iterator[tuple[str, EnvoyDescriptor]]:
    """Each descriptor that has a limit, with the name of its rule."""
    for one in descriptors:
        here = way + entry_text(one.key, one.value or None)
        if one.rate_limit is not None:
            yield f"{domain_text(domain)}/{here}", one
        yield from rule_names(domain, one.descriptors, here + "|")


def side_settings(envoy: EnvoySettings, name: str) -> tuple[str, _Quotas | None, bool]:
    """Algorithm, quotas and drain of the rule *name*: its own table counts, then that of its domain, then [envoy]."""
    own = envoy.rules.get(name, EnvoyRuleSettings())
    domain = envoy.rules.get(name.partition("/")[0], EnvoyRuleSettings())
    algorithm = own.algorithm or domain.algorithm or envoy.algorithm
    drain = next((given for given in (own.drain, domain.drain) if given is not None), True)
    return algorithm.lower(), own.quotas, drain


def quotas_of(limit: EnvoyLimit, quotas: _Quotas | None) -> list[Quota]:
    """The quotas of a rule: those of its table, or what its YAML says; none if nothing passes, or everything."""
    if limit.unlimited or (quotas is None and not limit.requests_per_unit):
        return []
    if quotas is None:
        return [Quota(min(limit.requests_per_unit, MAX_COUNT), SECONDS[limit.unit])]
    return [Quota.parse(quota) for quota in ([quotas] if isinstance(quotas, str) else quotas)]


def _encoded(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())
