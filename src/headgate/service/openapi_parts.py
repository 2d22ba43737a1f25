"""The parts that the OpenAPI document is made of: operations, parameters, bodies and responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REF = "#/components/schemas/{name}"

RATE_HEADERS = {
    "X-RateLimit-Limit": "the capacity",
    "X-RateLimit-Remaining": "what is left of it",
    "X-RateLimit-Reset": "when the key is as good as never seen: seconds since the epoch, rounded up",
}
TEXTS = {
    400: "the request is wrong; `detail` says what would be right",
    401: "a token is needed",
    403: "the token does not have the scope",
    404: "there is no such rule",
    405: "the method is not supported here",
    408: "the body did not come in time",
    409: "a lease of this id was released before; an id is for one acquisition",
    413: "the body is too large",
    414: "the query is too long",
    415: "the body is not JSON",
    429: "denied; nothing was spent",
    503: "the store does not answer and on_store_error is `raise`, or the service is overloaded",
}


def without_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of *field* without null, which a query cannot express."""
    given: dict[str, Any] = field["anyOf"][0]
    return given


def operation(
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
        array = {"type": "array", "items": ref("Check"), "maxItems": 1000}
        schema = array if body == "batch" else ref(body)
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    return operation


def parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of a struct as parameters of a query."""
    parameters = []
    for name, nullable in schema["properties"].items():
        field = without_null(nullable)
        kept = {key: value for key, value in field.items() if key != "description"}
        parameter = {"name": name, "in": "query", "schema": kept, "description": field.get("description", "")}
        parameters.append(parameter | {"required": name in schema.get("required", [])})
    return parameters


def rule_in_path(schema: dict[str, Any]) -> dict[str, Any]:
    names = {"type": "string", "enum": without_null(schema["properties"]["rule"])["enum"]}
    why = "a rule whose key has no part `key`"
    return {"name": "rule", "in": "path", "schema": names, "description": why, "required": True}


def at_least_0(parameter: dict[str, Any]) -> dict[str, Any]:
    return parameter | {"schema": parameter["schema"] | {"minimum": 0}}


def ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(name=name)}


def json_content(text: str, name: str, kind: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {kind: {"schema": ref(name)}}}


def decided(
    text: str, *more: str, name: str = "Answer", headers: Iterable[str] = tuple(RATE_HEADERS)
) -> dict[str, Any]:
    """The response with a decision: its *headers* of rates, and *more*."""
    fields = {header: {"description": RATE_HEADERS[header], "schema": {"type": "integer"}} for header in headers}
    for header in more:
        fields[header] = {"description": "seconds, at least 1", "schema": {"type": "integer", "minimum": 1}}
    return json_content(text, name) | {"headers": fields}


def one_of(*names: str) -> dict[str, Any]:
    """The content of a response that has one of several schemas."""
    return {"content": {"application/json": {"schema": {"anyOf": [ref(name) for name in names]}}}}


def with_values(given: list[dict[str, Any]], name: str, values: list[str]) -> list[dict[str, Any]]:
    """The parameters *given*, where the one called *name* may have these values too."""
    found = []
    for parameter in given:
        if parameter["name"] == name:
            schema = parameter["schema"]
            parameter = parameter | {"schema": schema | {"enum": [*schema.get("enum", []), *values]}}
        found.append(parameter)
    return found


def required(given: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """The parameters *given*, where those called *names* must be there."""
    return [parameter | {"required": parameter["name"] in names} for parameter in given]


def list_of_answers() -> dict[str, Any]:
    schema = {"type": "array", "items": ref("Answer")}
    return {"description": "the answers", "content": {"application/json": {"schema": schema}}}


def problems(*statuses: int) -> dict[str, Any]:
    return {str(status): json_content(TEXTS[status], "Problem", "application/problem+json") for status in statuses}


def plain_text(text: str) -> dict[str, Any]:
    found = {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"200": found, **problems(401, 403)}


def any_object(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}


def health_status() -> dict[str, Any]:
    status = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
    content = {"application/json": {"schema": status}}
    return {"200": {"description": "UP", "content": content}, "503": {"description": "not UP", "content": content}}


def without_bodies(responses: dict[str, Any]) -> dict[str, Any]:
    return {
        status: {key: value for key, value in response.items() if key != "content"}
        for status, response in responses.items()
    }
