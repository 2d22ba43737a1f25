"""The settings of the service: types, which are also the JSON Schema, and checks that types cannot express.

An unknown field, a quota that cannot be read or a network with host bits set stops the start, with the field's path
and what would be right. `headgate.service.files` adds the file and the line.
"""

from __future__ import annotations

import re
from ipaddress import ip_interface
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from headgate.algorithms import ALGORITHMS
from headgate.quota import Quota
from headgate.rule import POLICIES, Rule
from headgate.service.envoy_settings import (
    Counting,
    EnvoyRuleSettings,
    EnvoySettings,
    GrpcSettings,
    grpc_problems,
    problems,
)
from headgate.service.lease_settings import (
    AccuracyName,
    Concurrency,
    HybridSettings,
    LeaseSeconds,
    concurrency_problems,
    concurrency_store_refusal,
    rule_refusal,
    store_refusal,
)
from headgate.stores.base import SCHEMES, scheme_of
from headgate.web.client_ip import parse_network

BUCKETS = tuple(name for name, spec in ALGORITHMS.items() if spec.takes_burst)
DEFAULT_BUCKET = "10/second burst 100"  # the specification's: a capacity of 100, refilled with 10 a second
DEFAULT_WINDOW = "100/minute"
NAME = re.compile("[A-Za-z0-9._-]{1,64}")  # of rules and plans: used in labels, header values and Redis keys
KEY_PARTS = ("key", "address", "host", "method", "path")  # beside header:NAME
THROTTLE_RULE = "cl.throttle"  # under which the limits of the command CL.THROTTLE are counted and kept
CLIENT_RULE = "headgate.limit"  # under which the limits of clients are counted
RESERVED = {THROTTLE_RULE: "the limits of the command CL.THROTTLE", CLIENT_RULE: "the limits of clients"}
MAX_RULES = 2000  # shared_counters has room for each rule under one algorithm, and for the default under all

Text = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
PORTS = ("port", "resp_port", "grpc_port")
QuotaText = Annotated[str, Meta(description="'100/minute', '80/10 minutes', '10/second burst 100'")]
Quotas = QuotaText | list[QuotaText]
Override = Quotas | Concurrency
HeaderName = Annotated[str, Meta(pattern="^[A-Za-z0-9-]+$")]
Policy = Literal["allow", "deny", "local", "raise"]
Header = Literal["x-forwarded-for", "x-real-ip", "forwarded"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
TokenScope = Literal["check", "read", "admin"]
SCOPES = get_args(TokenScope)
CHOICES = {
    "on_store_error": get_args(Policy),
    "client_headers": get_args(Header),
    "log_level": get_args(LogLevel),
    "log_format": get_args(LogFormat),
    "counting": get_args(Counting),
    "scope": SCOPES,
    "accuracy": get_args(AccuracyName),
}


class RuleSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One rule. Its name is the name of its table: [rules.login]."""

    quotas: Annotated[
        Quotas | dict[str, Quotas] | None,
        Meta(description="a quota, several that must all allow, or a table of both kinds: bucket = ..., window = ..."),
    ] = None
    algorithm: Annotated[str, Meta(description="token_bucket, ..., in any case; a check may ask for another")] = (
        "token_bucket"
    )
    key: Annotated[
        list[Text], Meta(description="parts of the key: key, address, header:NAME, host, method, path", min_length=1)
    ] = msgspec.field(default_factory=lambda: ["key"])
    cost: Annotated[int, Meta(ge=1, description="permits that each permit of a check costs")] = 1
    on_store_error: Annotated[Policy, Meta(description="the answer when the store cannot")] = "allow"
    hybrid: Annotated[
        bool | HybridSettings,
        Meta(description="on Redis: decide from leases, most checks without a round trip; true, or { accuracy = ... }"),
    ] = False
    shadow: Annotated[bool, Meta(description="decide and count, but always allow")] = False
    concurrency: Concurrency | None = None
    lease: LeaseSeconds | None = None
    overrides: Annotated[
        dict[str, Override],
        Meta(description="other quotas, or a plan's name, for single keys; other numbers with concurrency"),
    ] = {}
    exempt: Annotated[list[Text], Meta(description="keys, and networks of clients, that are always allowed")] = []


class TokenSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A token: its SHA-256 as `headgate token` prints it, or the name of a file that holds it."""

    scope: TokenScope
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] = ""
    file: str = ""


class TLSSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Certificates of the listeners beside HTTP. With client_ca, a client must have a certificate of that authority."""

    cert: Annotated[Text, Meta(description="file with the certificate and its chain, PEM")]
    key: Annotated[Text, Meta(description="file with its private key, PEM, not encrypted")]
    client_ca: Annotated[str, Meta(description="file with the authorities of clients' certificates, PEM")] = ""


TABLES = {"tokens": TokenSettings, "tls": TLSSettings, "grpc": GrpcSettings}  # those with fields of their own


class Settings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """All settings of the file. Host, ports, tls, workers, log_format and what is the store's need a restart."""

    host: Text = "127.0.0.1"
    port: Port = 8080
    resp_port: Annotated[Port | None, Meta(description="port for the Redis protocol; none without it")] = None
    grpc_port: Annotated[Port | None, Meta(description="port for Envoy's rate-limit service; none without it")] = None
    tls: Annotated[TLSSettings | None, Meta(description="for resp_port and grpc_port")] = None
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    store: Annotated[Text, Meta(description="memory://, shared://name, redis://host:port/db, ...")] = "memory://"
    max_keys: Annotated[int, Meta(ge=1, description="bound of the memory store")] = 1_000_000
    min_connections: Annotated[int | None, Meta(description="to each Redis, opened before the first check; 4")] = None
    max_connections: Annotated[int | None, Meta(description="to each Redis; a worker uses at most 4")] = None
    client_limits: Annotated[
        int, Meta(ge=0, le=100_000, description="limits that clients may bring along, with store headgate://; 0: none")
    ] = 0
    client_limits_hybrid: Annotated[
        bool, Meta(description="on Redis: decide limits of clients from leases, most checks without a round trip")
    ] = False
    retries: Annotated[int | None, Meta(description="of a call to Redis, where it is safe to send it again")] = None
    application: Annotated[str, Meta(description="a label of every metric")] = ""
    trusted_proxies: Annotated[list[str], Meta(description="proxies whose forwarded headers are trusted")] = []
    client_headers: Annotated[list[Header], Meta(description="where they write it; the first that is there counts")] = (
        msgspec.field(default_factory=lambda: ["x-forwarded-for", "x-real-ip"])
    )
    host_header: Annotated[HeaderName, Meta(description="where they write a request's host")] = "x-forwarded-host"
    method_header: Annotated[HeaderName, Meta(description="and its method")] = "x-forwarded-method"
    uri_header: Annotated[HeaderName, Meta(description="and its path and query")] = "x-forwarded-uri"
    ipv6_prefix: Annotated[int, Meta(ge=16, le=128)] = 64
    max_wait: Annotated[float, Meta(ge=0, le=3600, description="seconds that wait= may ask for")] = 30.0
    ietf_headers: Annotated[bool, Meta(description="RateLimit and RateLimit-Policy as well, of draft 08 to 11")] = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_keys: Annotated[bool, Meta(description="keys in clear in logs; else a digest of each")] = False
    rules: dict[str, RuleSettings] = {}
    plans: Annotated[dict[str, Quotas], Meta(description="quotas that overrides can name")] = {}
    tokens: list[TokenSettings] = []
    envoy: EnvoySettings = msgspec.field(default_factory=EnvoySettings)
    grpc: GrpcSettings = msgspec.field(default_factory=GrpcSettings)


class BadFile(ValueError):
    """A file, or a variable of the environment, that the service cannot start with."""


class BadSetting(ValueError):
    """One setting is wrong; *path* names it from the top."""

    def __init__(self, path: tuple[str | int, ...], why: str) -> None:
        super().__init__(why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.why}" if self.path else self.why


def dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path)


def convert(raw: Any) -> Settings:
    """Settings from the content of a file."""
    raw = _lowered(raw)
    if isinstance(raw, dict):
        if isinstance(raw.get("rules"), dict):
            raw["rules"] = {name: _lowered(rule) for name, rule in raw["rules"].items()}
            for rule in raw["rules"].values():
                if isinstance(rule, dict) and isinstance(rule.get("hybrid"), dict):
                    rule["hybrid"] = _lowered(rule["hybrid"])
        if isinstance(raw.get("tokens"), list):
            raw["tokens"] = [_lowered(token) for token in raw["tokens"]]
        if "envoy" in raw:
            raw["envoy"] = _lowered(raw["envoy"])
            _convert(raw["envoy"], EnvoySettings, ("envoy",))
    found: Settings = _convert(raw, Settings, ())
    check(found)
    return found


def _convert(raw: Any, kind: type[Any], path: tuple[str | int, ...]) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `")
    inner = place.removeprefix("key in ").lstrip("`").removeprefix("$").rstrip("`")
    known, anywhere, _ = inner.partition("[...]")
    if anywhere and known == ".rules":  # msgspec does not say which table it is
        rule_kind = EnvoyRuleSettings if kind is EnvoySettings else RuleSettings
        for name, rule in raw["rules"].items():
            _convert(rule, rule_kind, (*path, "rules", name))
    steps = re.findall(r"\.([^.\[]+)|\[(\d+)\]", known)
    path = (*path, *(int(number) if number else name for name, number in steps))
    if unknown := re.search("unknown field `(.*)`", why):
        kind = HybridSettings if path[-1:] == ("hybrid",) else kind
        kind = {"tokens": TokenSettings, "tls": TLSSettings, "grpc": GrpcSettings}.get(
            str(path[0]) if path else "", kind
        )
        why = f"there is no such setting; known are {', '.join(kind.__struct_fields__)}"
        path = (*path, unknown[1])
    raise BadSetting(path, explain(path, why))


def explain(path: tuple[str | int, ...], why: str) -> str:
    """The error of msgspec about a value, with the choices that there are."""
    choices = next((CHOICES[part] for part in path if isinstance(part, str) and part in CHOICES), None)
    more = f"; use one of {', '.join(choices)}" if choices and "enum" in why else ""
    if "Expected `bool`" in why:
        more = "; write true or false"
    if "Expected `int`" in why:
        more = "; write a whole number"
    if path[-1:] == ("concurrency",) and "got" in why:
        more = "; write a number of slots, for example concurrency = 20"
    if path[-1:] == ("accuracy",):
        more = f"; use one of {', '.join(get_args(AccuracyName))}, or the seconds between two reports, from 0.5 to 300"
    if path[-1:] == ("hybrid",):
        more = '; write true, false or { accuracy = "medium" }'
    return why[:1].lower() + why[1:] + more


def lowered(name: str, value: Any) -> Any:
    """*value* in lower case if *name* has a list of choices: those may be written in any case."""
    if name not in CHOICES:
        return value
    if isinstance(value, list):
        return [lowered(name, one) for one in value]
    return value.lower() if isinstance(value, str) else value


def _lowered(table: Any) -> Any:
    return {name: lowered(name, value) for name, value in table.items()} if isinstance(table, dict) else table


def check(settings: Settings) -> None:
    """Refuse what the types allow and the service cannot use."""
    if scheme_of(settings.store) not in SCHEMES:
        shown = settings.store.partition("//")[0]
        raise BadSetting(("store",), f"unknown store {shown!r:.40}; it starts with one of {', '.join(SCHEMES)}")
    for i, name in enumerate(PORTS[1:], 1):
        for other in PORTS[:i]:
            if (port := getattr(settings, name)) and port == getattr(settings, other):
                raise BadSetting((name,), f"{port} is also {other}; give each a port of its own")
    if settings.application:
        _check_name(("application",), settings.application)
    for i, text in enumerate(settings.trusted_proxies):
        if text == "*":
            why = "'*' would let every client choose its own address; name your proxies' networks"
            raise BadSetting(("trusted_proxies", i), why)
        _try(("trusted_proxies", i), parse_network, text)
    for name, quotas in settings.plans.items():
        _check_name(("plans", name), name)
        for quota in as_list(quotas):
            _try(("plans", name), Quota.parse, quota)
    if len(settings.rules) > MAX_RULES:
        raise BadSetting(("rules",), f"{len(settings.rules)} rules; at most {MAX_RULES} can be counted apart")
    for name, rule in settings.rules.items():
        _check_name(("rules", name), name)
        if name in RESERVED:
            raise BadSetting(("rules", name), f"{RESERVED[name]} have this name; choose another")
        _check_rule(("rules", name), name, rule, settings.plans)
    for path, why in problems(settings.envoy):
        raise BadSetting(("envoy", *path), why)
    for path, why in grpc_problems(settings.grpc):
        raise BadSetting(("grpc", *path), why)
    for i, token in enumerate(settings.tokens):
        if bool(token.sha256) == bool(token.file):
            raise BadSetting(("tokens", i), "give sha256 or file, one of them; `headgate token` prints both")


def check_store_of_rules(settings: Settings) -> None:
    """Refuse hybrid rules, and concurrency, on a store that cannot keep their leases.

    This is not part of `check`: a file may leave the store to others.
    """
    why, why_no_slots = store_refusal(settings.store), concurrency_store_refusal(settings)
    if settings.client_limits_hybrid and why:
        raise BadSetting(("client_limits_hybrid",), why)
    for name, rule in settings.rules.items():
        if rule.hybrid and why:
            raise BadSetting(("rules", name, "hybrid"), why)
        if rule.concurrency and why_no_slots:
            raise BadSetting(("rules", name, "concurrency"), why_no_slots)


def _check_rule(path: tuple[str, ...], name: str, rule: RuleSettings, plans: dict[str, Quotas]) -> None:
    kind = rule.algorithm.lower()
    if kind not in ALGORITHMS:
        why = f"unknown algorithm {rule.algorithm!r:.40}; use one of {', '.join(ALGORITHMS)}"
        raise BadSetting((*path, "algorithm"), why)
    for place, why in concurrency_problems(name, rule):
        raise BadSetting((*path, *place), why)
    if rule.concurrency is None:
        _check_quotas(path, name, rule, plans, kind)
    for i, text in enumerate(rule.exempt):
        if is_network(text):
            _try((*path, "exempt", i), parse_network, text)
    for i, part in enumerate(rule.key):
        if part not in KEY_PARTS and not re.fullmatch("header:[A-Za-z0-9-]+", part):
            why = f"{part!r:.40} is no part of a key; use {', '.join(KEY_PARTS)} or header:NAME"
            raise BadSetting((*path, "key", i), why)
    assert rule.on_store_error in POLICIES


def _check_quotas(path: tuple[str, ...], name: str, rule: RuleSettings, plans: dict[str, Quotas], kind: str) -> None:
    if rule.quotas is None and name != "default":
        raise BadSetting(path, 'a rule needs quotas, for example quotas = "100/minute", or concurrency = 20')
    if isinstance(rule.quotas, dict):
        for family, quotas in rule.quotas.items():
            if family not in ("bucket", "window"):
                why = f"a table of quotas has bucket and window, not {family!r:.40}"
                raise BadSetting((*path, "quotas", family), why)
            own = BUCKETS[0] if family == "bucket" else "sliding_window"
            _try((*path, "quotas", family), Rule, quotas, own, name)
    made = [_try((*path, "quotas"), lambda: Rule(quotas_for(name, rule, kind), kind, name))]
    for key, quotas in quota_overrides(rule).items():
        _check_override((*path, "overrides", key), quotas, plans)
        made.append(_try((*path, "overrides", key), Rule, resolve_plan(quotas, plans), kind, name))
    if rule.hybrid:
        places: list[tuple[str | int, ...]] = [
            (*path, "hybrid"),
            *((*path, "overrides", key) for key in rule.overrides),
        ]
        for place, one in zip(places, made, strict=True):
            if why := rule_refusal(one):
                raise BadSetting(place, why)
    if rule.cost > (least := min(one.capacity for one in made)):
        raise BadSetting((*path, "cost"), f"{rule.cost} is above the capacity of {least}: no check could be allowed")


def _check_override(path: tuple[str, ...], quotas: Quotas, plans: dict[str, Quotas]) -> None:
    """Refuse a text that is neither a quota nor the name of a plan; the error lists the plans."""
    if not isinstance(quotas, str) or quotas in plans:
        return
    try:
        Quota.parse(quotas)
    except ValueError as error:
        known = f"name one of the plans {', '.join(list(plans)[:20])}" if plans else "add that plan to [plans]"
        raise BadSetting(path, f"{error}; or {known}") from None


def is_network(text: str) -> bool:
    """Whether *text* looks like an address or a network, even a wrong one, and not like a key."""
    try:
        ip_interface(text)
    except ValueError:
        return False
    return True


def quotas_for(name: str, rule: RuleSettings, kind: str) -> Quotas:
    """The quotas of *rule* under algorithm *kind*; the specification's where the default rule sets none."""
    family = "bucket" if kind in BUCKETS else "window"
    defaults = {"bucket": DEFAULT_BUCKET, "window": DEFAULT_WINDOW}
    if isinstance(rule.quotas, dict):
        if family not in rule.quotas and (name != "default" or not rule.quotas):
            raise ValueError(f"its quotas have no {family}, which {kind} needs")
        return rule.quotas.get(family, defaults[family])
    return defaults[family] if rule.quotas is None else rule.quotas


def quota_overrides(rule: RuleSettings) -> dict[str, Quotas]:
    """The overrides of a rule with quotas."""
    return {key: override for key, override in rule.overrides.items() if not isinstance(override, int)}


def resolve_plan(quotas: Quotas, plans: dict[str, Quotas]) -> Quotas:
    """*quotas*, or those of the plan that *quotas* names."""
    return plans.get(quotas, quotas) if isinstance(quotas, str) else quotas


def as_list(quotas: Quotas) -> list[str]:
    return [quotas] if isinstance(quotas, str) else quotas


def _check_name(path: tuple[str, ...], name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadSetting(path, f"{name!r:.80} is no name: 1 to 64 letters, digits, dots, dashes, underscores")


def _try(path: tuple[str | int, ...], make: Any, *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except ValueError as error:
        raise BadSetting(path, str(error)) from None
