"""`ratelimit`: a limit for a view, with the arguments of django-ratelimit and those of headgate.

@ratelimit(key="ip", rate="5/m", method="POST")
def login(request): ...
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404
from django.utils.decorators import method_decorator

from headgate.rule import AlgorithmName, OnStoreError, Quotas
from headgate.web.core import without_loop
from headgate.web.django.limits import DjangoExchange, DjangoLimit
from headgate.web.django.settings import current
from headgate.web.django.sources import key_source, rate_source
from headgate.web.django.views import AROUND, EXEMPT, MARK, marks, scope_prefix
from headgate.web.exchange import CLIENT_LEFT, HANDLER_RAISED, ResponseInfo
from headgate.web.limit import LimitOptions, OnDenied, SetupError, check_bool
from headgate.web.subject import SubjectNames

View = TypeVar("View", bound=Callable[..., Any])
Function = Callable[..., Any]
OfRequest = Callable[[Any], Any]
OfGroup = Callable[[str, Any], Any]  # of the group and the request, as with django-ratelimit

ALL = None
UNSAFE = ("DELETE", "PATCH", "POST", "PUT")
STATUS = {Http404: 404, PermissionDenied: 403, SuspiciousOperation: 400, BadRequest: 400}

_numbers = itertools.count(1)
_names = SubjectNames()


class ratelimit:  # noqa: N801 # the name of django-ratelimit
    """A limit for a plain view, an async view, a method of a class view, or a whole class view.

    `request.ratelimit` is the decision. All limits of a view that block are one decision. `ratelimit.exempt` frees a
    view from the default limit.

    Args:
        key: "ip", "user" (the address if not logged in), "header:NAME", "get:FIELD", "post:FIELD", a function of the
            request (or of group and request), the dotted path of one, or a list: several subjects; default:
            HEADGATE["KEY"]
        rate: "5/m", "100/5m", "10/second burst 100", a list, a pair (count, seconds), or a function as for key; its
            result may be None: no limit
        method: only requests with this method, or with one of these
        block: False: the view runs in any case, and `request.limited` says what was decided
        group: limits of one group, rate and key share their state; default: the route
        scope: another name for group
        cost: see `LimitOptions`
        count_if: see `LimitOptions`
        exempt_when: see `LimitOptions`
        algorithm: see `LimitOptions`
        on_store_error: see `LimitOptions`
        shadow: see `LimitOptions`
        timeout: see `LimitOptions`
        on_denied: see `LimitOptions`
    """

    ALL = ALL
    UNSAFE = UNSAFE

    def __init__(
        self,
        group: str | None = None,
        key: str | OfRequest | OfGroup | Sequence[str | OfRequest | OfGroup] | None = None,
        rate: Quotas | tuple[int, float] | OfRequest | OfGroup | None = None,
        method: str | Iterable[str | None] | None = ALL,
        block: bool = True,
        *,
        scope: str | None = None,
        cost: int | OfRequest | None = None,
        count_if: Callable[[ResponseInfo], Any] | None = None,
        exempt_when: OfRequest | None = None,
        algorithm: AlgorithmName | None = None,
        on_store_error: OnStoreError | None = None,
        shadow: bool | None = None,
        timeout: float | None = None,
        on_denied: OnDenied | None = None,
    ) -> None:
        if callable(group) or rate is None:
            raise SetupError("ratelimit needs a rate: @ratelimit(key='ip', rate='5/m')")
        if group and scope:
            raise SetupError(f"group and scope are two names of one thing, got {group!r:.40} and {scope!r:.40}")
        self.block = check_bool("block", block)
        self.key, self.given_rate = key, rate
        self.group = group or scope or ""
        self.mark = f"{MARK}{next(_numbers)}"
        options = {
            "cost": cost,
            "count_if": count_if,
            "exempt_when": exempt_when,
            "algorithm": algorithm,
            "on_store_error": on_store_error,
            "shadow": shadow,
            "timeout": timeout,
            "on_denied": on_denied,
            "key": None if key is None else key_source(key, self.group),
            "methods": method_names(method) or None,
            "scope": self.group,
        }
        self.options: LimitOptions = {name: value for name, value in options.items() if value is not None}  # type: ignore[assignment]
        self.rate = rate_source(rate, self.group)
        made = DjangoLimit(self.rate, **self.options)  # a mistake is found where it is written
        if key is not None:  # the limit is made when it is first met: names go by the order of the decorators
            _names.tell_apart(made.subjects, self.group)
            self.options["key"] = made.subjects  # type: ignore[typeddict-item]  # which the core takes, too

    def __call__(self, view: View) -> View:
        """*view* with this limit before it."""
        if isinstance(view, type) and hasattr(view, "dispatch"):
            return method_decorator(self, name="dispatch")(view)  # type: ignore[no-any-return]
        if not callable(view) or isinstance(view, type):
            raise SetupError(f"@ratelimit(...) goes on a view or a View class, got {view!r:.60}")
        wrapper = _on_loop(view) if _is_async(view) else _in_thread(view)
        setattr(wrapper, self.mark, self)
        if inspect.isfunction(view):
            setattr(view, AROUND, self)
        _keep_types(wrapper, view)
        return wrapper  # type: ignore[return-value]

    @staticmethod
    def exempt(view: View) -> View:
        """A view without the default limit.

        Args:
            view: plain, async or a class
        """
        if not callable(view):
            raise SetupError(f"@ratelimit.exempt goes on a view or a View class, got {view!r:.60}")
        setattr(view, EXEMPT, (True,))
        return view


def method_names(method: str | Iterable[str | None] | None) -> Sequence[str]:
    """The methods that a limit is for; none: all of them, which django-ratelimit writes as ``(None,)``."""
    if method is not None and (isinstance(method, bytes) or not isinstance(method, Iterable)):
        raise SetupError(f"method is the name of a method or a list of them, such as 'POST', got {method!r:.40}")
    names = [method] if isinstance(method, str) else list(method or ())
    return [name for name in names if name is not None]


def _keep_types(wrapper: Any, view: Any) -> None:
    """Give *wrapper* the types of *view*'s parameters: django-ninja before 1.4 looks their names up in this module."""
    if any(isinstance(annotation, str) for annotation in getattr(view, "__annotations__", {}).values()):
        try:
            wrapper.__signature__ = inspect.signature(view, eval_str=True)
        except (NameError, SyntaxError, TypeError, AttributeError):
            pass  # a name that only type checkers know


def _is_async(view: Function) -> bool:
    """Whether *view* is awaited; `dispatch` of an async class view is a plain method that returns a coroutine."""
    if iscoroutinefunction(view):
        return True
    while isinstance(view, functools.partial):
        view = view.func
    owner = type(getattr(view, "__self__", None))
    return getattr(view, "__name__", "") == "dispatch" and bool(getattr(owner, "view_is_async", False))


def _in_thread(view: Function) -> Function:
    @functools.wraps(view)
    def limited_view(*args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs, limited_view, threaded=True)
        if not without_loop(call.enter()):
            return without_loop(call.refuse())
        try:
            response = view(*args, **kwargs)
        except Exception as error:
            without_loop(call.leave(ResponseInfo(status_of(error))))
            raise
        return without_loop(call.leave(response))

    return limited_view


def _on_loop(view: Function) -> Function:
    @functools.wraps(view)
    async def limited_view(*args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs, limited_view, threaded=False)
        if not await call.enter():
            return await call.refuse()
        status = CLIENT_LEFT
        try:
            response = await view(*args, **kwargs)
            status = 0
        except Exception as error:
            status = status_of(error)
            raise
        finally:
            if status:
                await call.leave(ResponseInfo(status))
        return await call.leave(response)

    return limited_view


class Call:
    """One call of a limited view. The outermost one finishes the request, unless the middleware does."""

    def __init__(self, args: tuple[Any, ...], named: dict[str, Any], view: Function, *, threaded: bool) -> None:
        self.limits = current()
        direct = not (args and hasattr(args[0], "META"))  # a method, which is called with its view first
        self.request = (args[1] if len(args) > 1 else named.get("request")) if direct else args[0]
        if not hasattr(self.request, "META"):
            raise SetupError(f"the limited view {view.__name__} was called with {args!r:.60}, and without a request")
        direct = direct and bool(args)
        self.threaded = threaded
        exchange = self._exchange()
        self.outermost = not exchange.managed
        exchange.managed = True
        exchange.handler = scope_prefix(view.__name__) if direct or _is_method(view) else ""
        self.declared = marks(view)

    async def enter(self) -> bool:
        """Meet the limits, those of all decorators at once; False: the request is refused."""
        return await self.limits.meet(self._exchange(), [self.limits.of(each) for each in self.declared])

    async def refuse(self) -> Any:
        return await self.limits.refuse(self._exchange())

    async def leave(self, response: Any) -> Any:
        """Finish the request, if that is left to this call. *response* may be the status of an error."""
        if self.outermost:
            await self.limits.finish(self._exchange(), response)
        return response

    def _exchange(self) -> DjangoExchange:
        return self.limits.exchange(self.request, threaded=self.threaded)


def _is_method(view: Any) -> bool:
    """Whether `method_decorator` made *view* of a method: then it wraps the method, bound to its view."""
    while view is not None:
        if isinstance(view, functools.partial):
            return hasattr(view.func, "__self__")
        view = getattr(view, "__wrapped__", None)
    return False


def status_of(error: Exception) -> int:
    """The status of the response that an exception will become."""
    status = getattr(error, "status_code", None)  # of REST framework and django-ninja
    if isinstance(status, int):
        return status
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), HANDLER_RAISED)
