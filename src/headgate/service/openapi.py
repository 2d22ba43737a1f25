"""OpenAPI 3.1 at /openapi.json; the schemas come from the types that the handlers read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import headgate
from headgate.algorithms import ALGORITHMS
from headgate.service.model import (
    Answer,
    BookingAnswer,
    BookingRequest,
    CancelAnswer,
    Check,
    Checks,
    LeaseAnswer,
    SlotAnswer,
    SlotLease,
    SlotRequest,
    WaitingCheck,
)
from headgate.service.openapi_parts import (
    REF,
    TEXTS,
    any_object,
    at_least_0,
    decided,
    health_status,
    json_content,
    list_of_answers,
    one_of,
    operation,
    parameters,
    plain_text,
    problems,
    required,
    rule_in_path,
    with_values,
    without_bodies,
    without_null,
)
from headgate.service.rsgi import HTTPProtocol, Problem, Response, Scope, json_response

if TYPE_CHECKING:
    from headgate.service.app import App, State

TYPES = (Answer, Check, WaitingCheck, BookingRequest, BookingAnswer, CancelAnswer, Problem)
SLOT_TYPES = (SlotRequest, SlotLease, SlotAnswer, LeaseAnswer)  # in the document if a rule has concurrency


async def serve(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    return json_response(describe(app.state))


def describe(state: State) -> dict[str, Any]:
    """The description of a service with these rules."""
    slots = list(state.rule_set.concurrency_rules)
    types = [*TYPES, *(SLOT_TYPES if slots else ()), Checks]
    (_, schemas) = msgspec.json.schema_components(types, ref_template=REF)
    for name in ("Check", "WaitingCheck", "BookingRequest"):
        properties = schemas[name]["properties"]
        without_null(properties["rule"])["enum"] = [name for name in state.rule_set.rules if name not in slots]
        most = max(rule.capacity for rule in state.rule_set.compiled())
        permits = {"type": "integer", "minimum": 1, "maximum": most, "default": 1, "description": "how many to spend"}
        properties["permits"]["anyOf"] = [permits, {"type": "null"}]
    without_null(schemas["WaitingCheck"]["properties"]["wait"])["maximum"] = state.settings.max_wait
    buckets = [name.upper() for name, spec in ALGORITHMS.items() if spec.takes_burst]
    without_null(schemas["BookingRequest"]["properties"]["algorithm"])["enum"] = buckets
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headgate",
            "version": headgate.__version__,
            "description": "A rate limiter for everything that speaks HTTP. Whole seconds are rounded up.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": _paths(schemas, slots)
        | (_slot_paths(state, schemas) if slots else {})
        | (_envoy_paths() if state.envoy else {})
        | (_command_paths() if state.settings.client_limits else {}),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _paths(schemas: dict[str, Any], slots: list[str]) -> dict[str, Any]:
    query = parameters(schemas["WaitingCheck"])
    plain = [parameter for parameter in query if parameter["name"] != "wait"]
    looking = [at_least_0(parameter) if parameter["name"] == "permits" else parameter for parameter in plain]
    resetting = [parameter for parameter in plain if parameter["name"] != "permits"]
    answer, denied = decided("granted"), decided("denied; nothing was spent", "Retry-After")
    found = answer
    if slots:  # remaining and reset are for rules of both kinds
        looking, resetting = (with_values(given, "rule", slots) for given in (looking, resetting))
        found = answer | one_of("Answer", "SlotAnswer")
    check = {"200": answer, "429": denied, **problems(400, 401, 403, 414, 503)}
    posted = {**check, **problems(408, 413, 415)}
    allowed = {"200": {"description": "allowed", "headers": answer["headers"]}}
    refused = json_content(TEXTS[429], "Problem", "application/problem+json") | {"headers": denied["headers"]}
    asked = {**allowed, "429": refused, **problems(400, 401, 403, 404, 503)}
    to_403 = {**allowed, "403": refused, **problems(400, 401, 404, 503)}
    named = [rule_in_path(schemas["Check"])]
    told = {"200": found, **problems(400, 401, 403, 414, 503)}
    limits = ("X-RateLimit-Limit", "X-RateLimit-Remaining")
    booked = {
        "200": decided("a slot", name="BookingAnswer", headers=limits),
        "429": decided("too late; nothing was taken", "Retry-After", name="BookingAnswer", headers=limits),
        **problems(400, 401, 403, 408, 413, 414, 415, 503),
        "409": problems(409)["409"] | {"description": "the id has a slot of other permits"},
    }
    named_slot = required(parameters(schemas["BookingRequest"]), "id")
    cancelling = [each for each in named_slot if each["name"] not in ("permits", "within", "grace")]
    cancelled = {"200": json_content("what became of it", "CancelAnswer"), **problems(400, 401, 403, 414, 503)}
    return {
        "/api/v1/rate-limit/check": {
            "get": operation("check", "Spend permits", check, query, tag="limits"),
            "post": operation(
                "checkByPost", "The same; a query as of GET works too", posted, [], "WaitingCheck", "limits", False
            ),
            "head": operation(
                "checkHead", "The head of the answer, nothing spent", without_bodies(check), query, None, "limits"
            ),
        },
        "/api/v1/rate-limit/remaining": {
            "get": operation("remaining", "What is left, nothing spent", told, looking, tag="limits")
        },
        "/api/v1/rate-limit/reset": {
            "delete": operation("reset", "Forget a key (scope admin)", told, resetting, tag="limits")
        },
        "/api/v1/rate-limit/check/batch": {
            "post": operation(
                "batch",
                "Many checks, each on its own, answered in order",
                {"200": list_of_answers(), **problems(400, 401, 403, 408, 413, 414, 415, 503)},
                [],
                "batch",
                "limits",
            )
        },
        "/api/v1/rate-limit/book": {
            "post": operation("book", "Book a slot; a query works too", booked, [], "BookingRequest", "limits", False),
            "delete": operation("cancel", "Give a slot up", cancelled, cancelling, tag="limits"),
        },
        "/api/v1/rate-limit/forward/{rule}": {
            "get": operation(
                "forward", "Answer to a proxy; any method, the query is ignored", asked, named, tag="limits"
            ),
            "post": operation("forwardByPost", "The same", asked, named, tag="limits"),
        },
        "/api/v1/rate-limit/forward/{rule}/403": {
            "get": operation("forwardTo403", "The same; a denial is a 403, for nginx", to_403, named, tag="limits")
        },
        "/actuator/prometheus": {"get": operation("prometheus", "Metrics", plain_text("metrics"), tag="operation")},
        "/metrics": {"get": operation("metrics", "The same", plain_text("metrics"), tag="operation")},
        "/actuator/health": {"get": operation("health", "The service and its store", health_status(), tag="operation")},
        "/actuator/health/liveness": {
            "get": operation("liveness", "Whether the process answers", health_status(), tag="operation")
        },
        "/actuator/health/readiness": {
            "get": operation("readiness", "Whether it should get traffic", health_status(), tag="operation")
        },
        "/actuator/info": {
            "get": operation(
                "info", "Version, store, rules", {"200": any_object("info"), **problems(401, 403)}, tag="operation"
            )
        },
    }


def _slot_paths(state: State, schemas: dict[str, Any]) -> dict[str, Any]:
    """Acquire, renew and release, which are there with rules that limit concurrency."""
    rules = state.rule_set.concurrency_rules
    properties = schemas["SlotRequest"]["properties"]
    most = max(max(each.limit for each in (rule, *(rule.overrides or {}).values())) for rule in rules.values())
    slots = {"type": "integer", "minimum": 1, "maximum": most, "default": 1, "description": "how many slots to take"}
    properties["permits"]["anyOf"] = [slots, {"type": "null"}]
    taking = required(with_values(parameters(schemas["SlotRequest"]), "rule", list(rules)), "rule")
    holding = required(with_values(parameters(schemas["SlotLease"]), "rule", list(rules)), "rule", "lease")
    limits = ("X-RateLimit-Limit", "X-RateLimit-Remaining")
    acquired = decided("a slot was taken", name="SlotAnswer", headers=limits)
    full = decided("all slots are in use; none was taken", "Retry-After", name="SlotAnswer", headers=limits)
    errors = problems(400, 401, 403, 408, 413, 414, 415, 503)
    lease = json_content("the lease", "LeaseAnswer")
    summaries = {
        "acquire": "Take slots on lease; the query may also be a JSON object in the body",
        "renew": "Start the time of a lease again",
        "release": "End a lease; `released` says whether it was there",
    }
    released = {"200": lease, **errors}
    taken = {"200": acquired, "429": full, **errors, **problems(409)}
    renewed = {"200": lease, **errors, "404": problems(404)["404"] | {"description": "there is no such lease"}}
    return {
        "/api/v1/rate-limit/acquire": {"post": operation("acquire", summaries["acquire"], taken, taking, tag="slots")},
        "/api/v1/rate-limit/renew": {"post": operation("renew", summaries["renew"], renewed, holding, tag="slots")},
        "/api/v1/rate-limit/release": {
            "post": operation("release", summaries["release"], released, holding, tag="slots"),
            "delete": operation("releaseByDelete", "The same", released, holding, tag="slots"),
        },
    }


def _envoy_paths() -> dict[str, Any]:
    """`POST /json`, which is there with rules for Envoy."""
    texts = {"type": "string"}
    count = {"type": "integer", "minimum": 0, "maximum": 4294967295}
    entry = {"type": "object", "properties": {"key": texts, "value": texts}, "additionalProperties": False}
    units = ["SECOND", "MINUTE", "HOUR", "DAY", "MONTH", "YEAR", "WEEK"]
    limit = {
        "type": "object",
        "properties": {"requestsPerUnit": count, "unit": {"enum": units}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    descriptor = {
        "type": "object",
        "properties": {
            "entries": {"type": "array", "items": entry, "maxItems": 64},
            "limit": limit,
            "hitsAddend": count,
        },
        "additionalProperties": False,
    }
    request = {
        "type": "object",
        "properties": {
            "domain": {"type": "string", "minLength": 1},
            "descriptors": {"type": "array", "items": descriptor, "minItems": 1, "maxItems": 128},
            "hitsAddend": count,
        },
        "required": ["domain", "descriptors"],
        "additionalProperties": False,
    }
    answered = {"200": any_object("within the limits"), "429": any_object("over a limit")}
    call = operation("json", "A call of Envoy's rate-limit service as JSON", answered, tag="limits")
    call["responses"] |= problems(400, 401, 403, 408, 413, 414, 503)
    call["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
    return {"/json": {"post": call}}


def _command_paths() -> dict[str, Any]:
    answered = {"200": {"description": "the replies, in order", "content": {"application/octet-stream": {}}}}
    call = operation("commands", "Calls of limiters in other processes, in the Redis protocol", answered, tag="limits")
    call["responses"] |= problems(400, 401, 403, 408, 413, 503)
    call["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return {"/api/v1/rate-limit/commands": {"post": call}}
