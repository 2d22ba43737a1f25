"""Which limits a view has: of decorators, on its class and its methods, and of throttles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from django.urls import LocalePrefixPattern, get_resolver

from headgate.web.django.throttles import Throttle
from headgate.web.limit import own_marks

if TYPE_CHECKING:
    from headgate.web.django.decorators import ratelimit

MARK = "_headgate_limit_"  # and a number: attributes of a view that survive every functools.wraps
EXEMPT = "_headgate_exempt"
AROUND = "_headgate_around"  # of a function that is limited: the last decorator around it
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
DEPTH = 4  # how many decorators deep a view is looked into


def marks(view: Any) -> list[ratelimit]:
    """The decorators that *view* carries, the innermost first."""
    own = getattr(view, "__dict__", {})
    return [value for name, value in own.items() if name.startswith(MARK)]


class ViewLimits(NamedTuple):
    """What is known of a view before it runs."""

    limited: bool
    exempt: bool


def limits_of(view: Callable[..., Any], method: str) -> ViewLimits:
    """Whether a request with *method* meets limits of the view's own, and whether it is exempt from the default."""
    look = _look_at if view.__hash__ is not None else _look_at.__wrapped__
    return look(view, method if method in METHODS else "")


@functools.lru_cache(4096)
def _look_at(view: Callable[..., Any], method: str) -> ViewLimits:
    parts = [*layers(view), class_of(view), *layers(handler_of(view, method))]
    exempt = any(own_marks(part, EXEMPT) for part in parts)
    limited = any(declared_on(view, method)) or any(throttles_of(view, method))
    return ViewLimits(limited or _decides_itself(view), exempt)


def forget() -> None:
    """Look at views again: settings have changed."""
    _look_at.cache_clear()


def declared_on(view: Any, method: str) -> Iterator[ratelimit]:
    """The decorators that a request with *method* meets."""
    parts = [view, handler_of(view, method), getattr(operation_of(view, method), "view_func", None)]
    seen = {id(mark): mark for part in parts if part is not None for inner in layers(part) for mark in marks(inner)}
    yield from seen.values()


def layers(view: Any, depth: int = DEPTH) -> Iterator[Any]:
    """*view*, and the functions that it wraps, also by decorators that do not say what they wrap."""
    yield view
    if depth:
        cells = [cell.cell_contents for cell in getattr(view, "__closure__", None) or () if _filled(cell)]
        inner = [getattr(view, "__wrapped__", None), getattr(view, "func", None), *cells]
        for each in inner:
            if callable(each) and not isinstance(each, type):
                yield from layers(each, depth - 1)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def class_of(view: Any) -> Any:
    """The class of a class view; None for others."""
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


def handler_of(view: Any, method: str) -> Any:
    """The method of a class view that serves *method*: get, or an action of a view set."""
    owner = class_of(view)
    actions = getattr(view, "actions", None) or {}
    name = method.lower()
    if owner is None or not name:
        return None
    if name == "head" and not hasattr(owner, "head"):
        name = "get"
    return getattr(owner, actions.get(name, name), None)


def handler_name(view: Any, method: str, declared: ratelimit) -> str:
    """What the scope of a limit begins with that is on a method of a class view; '' if it is on the whole view."""
    handler = handler_of(view, method)
    return scope_prefix(handler.__name__) if handler is not None and declared in marks(handler) else ""


def scope_prefix(name: str) -> str:
    """The methods of a class view have limits of their own: ``GET ``, or the name of an action."""
    return "" if name == "dispatch" else f"{name.upper() if name.upper() in METHODS else name} "


def throttles_of(view: Any, method: str) -> list[Any]:
    """The throttles of headgate on a view of REST framework (classes), or on an operation of django-ninja (objects)."""
    owner = class_of(view)
    if owner is not None:
        given = getattr(view, "initkwargs", None) or {}
        classes = given.get("throttle_classes", getattr(owner, "throttle_classes", None)) or ()
        return [each for each in classes if isinstance(each, type) and issubclass(each, Throttle)]
    return [each for each in getattr(operation_of(view, method), "throttle_objects", ()) if isinstance(each, Throttle)]


def operation_of(view: Any, method: str) -> Any:
    """The operation of django-ninja that serves *method*; None for other views."""
    cells = [cell.cell_contents for cell in getattr(view, "__closure__", None) or () if _filled(cell)]
    for owner in (getattr(view, "__self__", None), *cells):
        for operation in getattr(owner, "operations", None) or ():
            if method in getattr(operation, "methods", ()):
                return operation
    return None


def _decides_itself(view: Any) -> bool:
    """Whether a view of REST framework chooses its throttles for each request."""
    chooses = getattr(class_of(view), "get_throttles", None)
    return chooses is not None and chooses.__module__ != "rest_framework.views"


class Route(NamedTuple):
    """A view of the URLconf."""

    path: str
    view: Any


def routes(resolver: Any = None, prefix: str = "") -> Iterator[Route]:
    """All views of the URLconf, with their templates as a request's `resolver_match` has them."""
    for pattern in (resolver or get_resolver()).url_patterns:
        text = "" if isinstance(pattern.pattern, LocalePrefixPattern) else str(pattern.pattern)
        path = prefix + (text.removeprefix("^") if prefix else text)
        if hasattr(pattern, "url_patterns"):
            yield from routes(pattern, path)
        else:
            yield Route(path, pattern.callback)
