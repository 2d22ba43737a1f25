"""OpenAPI 3.1 at /openapi.json; the schemas come from the types that the handlers read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import headgate
from headgate.service.model import Answer, Check, Checks, WaitingCheck
from headgate.service.problem import Problem
from headgate.service.rsgi import HTTPProtocol, Response, Scope, json_response

if TYPE_CHECKING:
    from headgate.service.app import App, State

_REF = "#/components/schemas/{name}"
_TYPES = (Answer, Check, WaitingCheck, Problem)

_RATE_HEADERS = {
    "X-RateLimit-Limit": ("the capacity", "integer"),
    "X-RateLimit-Remaining": ("what is left of it", "integer"),
    "X-RateLimit-Reset": ("when the key is as good as never seen: seconds since the epoch, rounded up", "integer"),
}
_TEXTS = {
    400: "the request is wrong; `detail` says what would be right",
    401: "a token is needed",
    403: "the token does not have the scope",
    404: "there is no such rule",
    405: "the method is not supported here",
    408: "the body did not come in time",
    413: "the body is too large",
    414: "the query is too long",
    415: "the body is not JSON",
    429: "denied; nothing was spent",
    503: "the store does not answer and on_store_error is `raise`, or the service is overloaded",
}


async def serve(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    return json_response(describe(app.state))


def describe(state: State) -> dict[str, Any]:
    """The description of a service with these rules."""
    (_, schemas) = msgspec.json.schema_components([*_TYPES, Checks], ref_template=_REF)
    for name in ("Check", "WaitingCheck"):
        properties = schemas[name]["properties"]
        _given(properties["rule"])["enum"] = list(state.rule_set.rules)
        most = max(rule.capacity for rule in state.rule_set.compiled())
        permits = {"type": "integer", "minimum": 1, "maximum": most, "default": 1, "description": "how many to spend"}
        properties["permits"]["anyOf"] = [permits, {"type": "null"}]
    _given(schemas["WaitingCheck"]["properties"]["wait"])["maximum"] = state.settings.max_wait
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headgate",
            "version": headgate.__version__,
            "description": "A rate limiter for everything that speaks HTTP. Whole seconds are rounded up.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": _paths(schemas) | (_envoy_paths() if state.envoy else {}),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _given(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of *field* without null, which a query cannot express."""
    given: dict[str, Any] = field["anyOf"][0]
    return given


def _paths(schemas: dict[str, Any]) -> dict[str, Any]:
    query = _parameters(schemas["WaitingCheck"])
    plain = [parameter for parameter in query if parameter["name"] != "wait"]
    looking = [_at_least_0(parameter) if parameter["name"] == "permits" else parameter for parameter in plain]
    answer, denied = _answer("granted"), _answer("denied; nothing was spent", "Retry-After")
    check = {"200": answer, "429": denied, **_problems(400, 401, 403, 414, 503)}
    posted = {**check, **_problems(408, 413, 415)}
    allowed = {"200": {"description": "allowed", "headers": answer["headers"]}}
    refused = _json(_TEXTS[429], "Problem", "application/problem+json") | {"headers": denied["headers"]}
    asked = {**allowed, "429": refused, **_problems(400, 401, 403, 404, 503)}
    to_403 = {**allowed, "403": refused, **_problems(400, 401, 404, 503)}
    named = [_rule_in_path(schemas["Check"])]
    return {
        "/api/v1/rate-limit/check": {
            "get": _operation("check", "Spend permits", check, query, tag="limits"),
            "post": _operation(
                "checkByPost", "The same; a query as of GET works too", posted, [], "WaitingCheck", "limits", False
            ),
            "head": _operation(
                "checkHead", "The head of the answer, nothing spent", _headless(check), query, None, "limits"
            ),
        },
        "/api/v1/rate-limit/remaining": {
            "get": _operation(
                "remaining",
                "What is left, nothing spent",
                {"200": answer, **_problems(400, 401, 403, 414, 503)},
                looking,
                tag="limits",
            )
        },
        "/api/v1/rate-limit/reset": {
            "delete": _operation(
                "reset",
                "Forget a key (scope admin)",
                {"200": answer, **_problems(400, 401, 403, 414, 503)},
                [parameter for parameter in plain if parameter["name"] != "permits"],
                tag="limits",
            )
        },
        "/api/v1/rate-limit/check/batch": {
            "post": _operation(
                "batch",
                "Many checks, each on its own, answered in order",
                {"200": _list_of_answers(), **_problems(400, 401, 403, 408, 413, 414, 415, 503)},
                [],
                "batch",
                "limits",
            )
        },
        "/api/v1/rate-limit/forward/{rule}": {
            "get": _operation(
                "forward", "Answer to a proxy; any method, the query is ignored", asked, named, tag="limits"
            ),
            "post": _operation("forwardByPost", "The same", asked, named, tag="limits"),
        },
        "/api/v1/rate-limit/forward/{rule}/403": {
            "get": _operation("forwardTo403", "The same; a denial is a 403, for nginx", to_403, named, tag="limits")
        },
        "/actuator/prometheus": {"get": _operation("prometheus", "Metrics", _text("metrics"), tag="operation")},
        "/metrics": {"get": _operation("metrics", "The same", _text("metrics"), tag="operation")},
        "/actuator/health": {"get": _operation("health", "The service and its store", _health(), tag="operation")},
        "/actuator/health/liveness": {
            "get": _operation("liveness", "Whether the process answers", _health(), tag="operation")
        },
        "/actuator/health/readiness": {
            "get": _operation("readiness", "Whether it should get traffic", _health(), tag="operation")
        },
        "/actuator/info": {
            "get": _operation(
                "info", "Version, store, rules", {"200": _object("info"), **_problems(401, 403)}, tag="operation"
            )
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
    answered = {"200": _object("within the limits"), "429": _object("over a limit")}
    operation = _operation("json", "A call of Envoy's rate-limit service as JSON", answered, tag="limits")
    operation["responses"] |= _problems(400, 401, 403, 408, 413, 414, 503)
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
    return {"/json": {"post": operation}}


def _operation(
    name: str,
    summary: str,
    responses: dict[str, Any],
    parameters: list[dict[str, Any]] | None = None,
    body: str | None = None,
    tag: str = "",
    required: bool = True,
) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "tags": [tag], "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    if body:
        array = {"type": "array", "items": _ref("Check"), "maxItems": 1000}
        schema = array if body == "batch" else _ref(body)
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    return operation


def _parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of a struct as parameters of a query."""
    parameters = []
    for name, nullable in schema["properties"].items():
        field = _given(nullable)
        kept = {key: value for key, value in field.items() if key != "description"}
        parameter = {"name": name, "in": "query", "schema": kept, "description": field.get("description", "")}
        parameters.append(parameter | {"required": name in schema.get("required", [])})
    return parameters


def _rule_in_path(schema: dict[str, Any]) -> dict[str, Any]:
    names = {"type": "string", "enum": _given(schema["properties"]["rule"])["enum"]}
    why = "a rule whose key has no part `key`"
    return {"name": "rule", "in": "path", "schema": names, "description": why, "required": True}


def _at_least_0(parameter: dict[str, Any]) -> dict[str, Any]:
    return parameter | {"schema": parameter["schema"] | {"minimum": 0}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _json(text: str, name: str, kind: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {kind: {"schema": _ref(name)}}}


def _answer(text: str, *more: str) -> dict[str, Any]:
    headers = {name: {"description": why, "schema": {"type": kind}} for name, (why, kind) in _RATE_HEADERS.items()}
    for name in more:
        headers[name] = {"description": "seconds, at least 1", "schema": {"type": "integer", "minimum": 1}}
    return _json(text, "Answer") | {"headers": headers}


def _list_of_answers() -> dict[str, Any]:
    schema = {"type": "array", "items": _ref("Answer")}
    return {"description": "the answers", "content": {"application/json": {"schema": schema}}}


def _problems(*statuses: int) -> dict[str, Any]:
    return {str(status): _json(_TEXTS[status], "Problem", "application/problem+json") for status in statuses}


def _text(text: str) -> dict[str, Any]:
    found = {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"200": found, **_problems(401, 403)}


def _object(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}


def _health() -> dict[str, Any]:
    status = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
    content = {"application/json": {"schema": status}}
    return {"200": {"description": "UP", "content": content}, "503": {"description": "not UP", "content": content}}


def _headless(responses: dict[str, Any]) -> dict[str, Any]:
    return {
        status: {key: value for key, value in response.items() if key != "content"}
        for status, response in responses.items()
    }
