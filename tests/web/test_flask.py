"""Flask: which limits a request meets, what its answer says, and that it is counted once and exactly."""

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flask
import httpx
import pytest
from flask import Blueprint, Flask, g, request
from flask.views import MethodView, View
from werkzeug.exceptions import HTTPException
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import TestResponse

from headgate.testing import ManualClock
from headgate.web.flask import RateLimitExceeded, RateLimits, SetupError
from headgate.web.limit import Limit
from tests.support.clocks import WatchedClock, until
from tests.support.forged import FORGED
from tests.support.servers import Server
from tests.support.web_servers import served


def make(**options: Any) -> tuple[Flask, RateLimits]:
    app = Flask("shop")
    return app, RateLimits(app, **{"clock": ManualClock(), **options})


def get(app: Flask, path: str = "/", method: str = "GET", address: str = "192.0.2.1", **arguments: Any) -> TestResponse:
    return app.test_client().open(path, method=method, environ_base={"REMOTE_ADDR": address}, **arguments)


def statuses(app: Flask, count: int, path: str = "/", **arguments: Any) -> list[int]:
    return [get(app, path, **arguments).status_code for _ in range(count)]


def left(app: Flask, path: str = "/", **arguments: Any) -> int:
    """What the answer says is left."""
    return int(get(app, path, **arguments).headers["X-RateLimit-Remaining"])


PAGES = itertools.count()


def page() -> Callable[[], str]:
    """A view of its own: a limit marks the function that it is put on."""

    def view() -> str:
        return "hello"

    view.__name__ = f"page{next(PAGES)}"
    return view


# ------------------------------------------------------------------------------------------- what a request meets


def test_ten_lines() -> None:
    app, limits = make(default="3/minute")

    @app.route("/")
    def index() -> str:
        return "hello"

    @app.route("/search")
    @limits.limit("1/minute")
    def search() -> str:
        return "found"

    assert statuses(app, 4) == [200, 200, 200, 429]
    first, refused = get(app, "/search"), get(app, "/search")
    assert first.headers["X-RateLimit-Remaining"] == "0"
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "60"
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert refused.headers["Cache-Control"] == "no-store"
    assert refused.json is not None and refused.json["detail"].startswith("Rate limit exceeded (1/minute)")
    assert statuses(app, 1, address="192.0.2.2") == [200]


def test_order_of_decorators() -> None:
    """Above or below the route, twice, and among others."""
    app, limits = make()

    def other(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return view(*args, **kwargs)

        return wrapper

    orders: dict[str, list[Any]] = {
        "/below": [limits.limit("1/minute"), app.route("/below")],
        "/above": [app.route("/above"), limits.limit("1/minute")],
        "/above-twice": [app.route("/above-twice"), limits.limit("9/minute"), limits.limit("1/minute")],
        "/below-twice": [limits.limit("9/minute"), limits.limit("1/minute"), app.route("/below-twice")],
        "/around": [limits.limit("9/minute"), app.route("/around"), limits.limit("1/minute")],
        "/inner": [limits.limit("1/minute"), other, app.route("/inner")],
        "/middle": [other, limits.limit("1/minute"), other, app.route("/middle")],
    }
    for path, decorators in orders.items():
        view: Any = lambda: "hello"  # noqa: E731
        view.__name__ = path[1:]
        for decorator in decorators:
            view = decorator(view)
    assert {path: statuses(app, 2, path) for path in orders} == {path: [200, 429] for path in orders}


def test_a_decorator_that_hides_the_limit() -> None:
    """Then the limit is met when its function is called: late, but never not at all."""
    app, limits = make(default="9/minute")
    limited = limits.limit("1/minute")(page())
    app.add_url_rule("/", "hidden", lambda: limited())
    assert statuses(app, 2) == [200, 429]


def test_template_is_the_scope() -> None:
    """Path parameters share a limit, blueprints' prefixes and methods keep limits apart."""
    app, limits = make()
    for prefix in ("/v1", "/v2"):
        pages = Blueprint(prefix[1:], __name__, url_prefix=prefix)
        pages.add_url_rule("/items/<int:item>", "item", limits.limit("1/minute")(lambda item: "hello"))
        app.register_blueprint(pages)
    app.add_url_rule("/x", "get_x", limits.limit("1/minute")(lambda: "hello"), methods=["GET"])
    app.add_url_rule("/x", "post_x", limits.limit("1/minute")(lambda: "hello"), methods=["POST"])
    paths = ["/v1/items/1", "/v1/items/2", "/v2/items/1"]
    assert [get(app, path).status_code for path in paths] == [200, 429, 200]
    assert [get(app, "/x", method).status_code for method in ("GET", "HEAD", "POST")] == [200, 429, 200]
    assert [limiter.scope for limiter in limits.known_limiters()] == [
        "GET /v1/items/<int:item>", "GET /v2/items/<int:item>", "GET /x", "POST /x",
    ]  # fmt: skip


def test_default_is_for_everything_else() -> None:
    """Other routes, 404, 405, redirects and static files share it; a route with its own limit does not meet it."""
    app, limits = make(default="9/minute")
    app.add_url_rule("/", view_func=page())
    app.add_url_rule("/folder/", "folder", page())
    app.add_url_rule("/own", "own", limits.limit("5/minute")(page()))
    answers = [
        get(app), get(app, "/missing"), get(app, method="PUT"), get(app, "/folder"), get(app, "/static/x.css"),
        get(app, "/own"),
    ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [200, 404, 405, 308, 404, 200]
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["8", "7", "6", "5", "4", "4"]


def test_methods() -> None:
    """A limit for POST leaves GET to the default."""
    app, limits = make(default="9/minute")
    app.add_url_rule("/", view_func=limits.limit("2/minute", methods=["POST"])(page()), methods=["GET", "POST"])
    assert (left(app), left(app, method="POST"), left(app)) == (8, 1, 7)


def test_options() -> None:
    """Flask's own answer to OPTIONS does not spend the view's permits, and a CORS preflight spends none at all."""
    app, limits = make(default="9/minute")
    app.add_url_rule("/", view_func=limits.limit("5/minute")(page()))
    assert left(app, method="OPTIONS") == 8
    preflight = get(app, method="OPTIONS", headers={"Access-Control-Request-Method": "GET", "Origin": "https://x.org"})
    assert "X-RateLimit-Remaining" not in preflight.headers
    assert left(app) == 4


def test_class_based_views() -> None:
    """For all methods by `decorators`, or for single ones, each with a state of its own."""
    app, limits = make(default="99/minute")

    class Items(MethodView):
        decorators = [limits.limit("3/minute")]  # noqa: RUF012

        @limits.limit("1/minute")
        def post(self) -> str:
            return "made"

        @limits.limit("1/minute")
        def put(self) -> str:
            return "put"

        def get(self) -> str:
            return "items"

    @limits.limit("1/minute")
    class Page(View):
        def dispatch_request(self) -> str:
            return "page"

    app.add_url_rule("/items", view_func=Items.as_view("items"))
    app.add_url_rule("/page", view_func=Page.as_view("page"))
    asked = ["POST", "POST", "PUT", "GET", "GET"]
    assert [get(app, "/items", method).status_code for method in asked] == [200, 429, 200, 200, 429]
    assert statuses(app, 2, "/page") == [200, 429]


def test_blueprints() -> None:
    """A blueprint's limit is for all its views, nested ones and later ones too, and adds to their own."""
    app, limits = make(default="99/minute")
    outer, inner = Blueprint("outer", __name__, url_prefix="/outer"), Blueprint("inner", __name__, url_prefix="/inner")
    outer.add_url_rule("/early", "early", page())
    assert limits.limit("2/minute")(outer) is outer
    outer.add_url_rule("/late", "late", page())
    inner.add_url_rule("/own", "own", limits.limit("1/minute")(page()))
    inner.add_url_rule("/nested", "nested", page())
    outer.register_blueprint(inner)
    app.register_blueprint(outer)
    app.register_blueprint(outer, name="again", url_prefix="/again")
    for path in ("/outer/early", "/outer/late", "/outer/inner/nested", "/again/inner/nested"):
        assert statuses(app, 3, path) == [200, 200, 429], path
    assert statuses(app, 2, "/outer/inner/own") == [200, 429]


def test_a_blueprints_limit_may_be_shared_or_come_late() -> None:
    app, limits = make()
    pages = Blueprint("pages", __name__)
    for name in ("a", "b"):
        pages.add_url_rule(f"/{name}", name, page())
    app.register_blueprint(pages)
    assert "X-RateLimit-Limit" not in get(app, "/a").headers
    limits.limit("2/minute", scope="pages")(pages)
    assert [get(app, path).status_code for path in ("/a", "/b", "/a")] == [200, 200, 429]


def test_exempt() -> None:
    """From the default and from the limits around; a view keeps its own."""
    app, limits = make(default="9/minute")
    limited, free = Blueprint("limited", __name__), Blueprint("free", __name__)
    limits.limit("1/minute")(limited)
    limited.add_url_rule("/health", "health", limits.exempt(page()))
    limited.add_url_rule("/own", "own", limits.exempt(limits.limit("3/minute")(page())))
    limits.exempt(free).add_url_rule("/free", "free", lambda: "hello")
    limited.register_blueprint(free)
    app.register_blueprint(limited)
    limits.exempt(app.view_functions["static"])
    for path in ("/health", "/free", "/static/x.css"):
        assert "X-RateLimit-Limit" not in get(app, path).headers
    assert get(app, "/own").headers["X-RateLimit-Limit"] == "3"
    assert left(app, "/missing") == 8


def test_exempt_class_and_what_inherits() -> None:
    app, limits = make(default="1/minute")
    free: Any = limits.exempt(type("Free", (MethodView,), {"get": lambda self: "hello"}))
    more: Any = type("More", (free,), {})
    app.add_url_rule("/free", view_func=free.as_view("free"))
    app.add_url_rule("/more", view_func=more.as_view("more"))
    assert [get(app, path).status_code for path in ("/free", "/free", "/more", "/more")] == [200, 200, 200, 429]


def test_functions_get_the_request() -> None:
    """Key, quota, cost and exempt_when, plain or async."""
    app, limits = make()

    async def user(request: flask.Request) -> str:
        return request.headers["X-User"]

    @app.route("/<name>")
    @limits.limit(
        lambda request: "9/minute" if request.headers["X-User"] == "gold" else "2/minute",
        key=user,
        cost=lambda request: int(request.args.get("cost", 1)),
        exempt_when=lambda request: request.view_args["name"] == "free",
    )
    def view(name: str) -> str:
        return "hello"

    assert left(app, "/x", headers={"X-User": "ann"}) == 1
    assert left(app, "/x?cost=3", headers={"X-User": "gold"}) == 6
    assert get(app, "/x?cost=2", headers={"X-User": "ann"}).status_code == 429
    assert "X-RateLimit-Limit" not in get(app, "/free", headers={"X-User": "ann"}).headers


def test_several_subjects_are_all_or_nothing() -> None:
    app, limits = make()
    app.add_url_rule("/", view_func=limits.limit("2/minute", key=["address", "header:X-User"])(page()))
    for user, address, status in (
        ("a", 1, 200),
        ("a", 2, 200),
        ("a", 3, 429),
        ("b", 3, 200),
        ("c", 3, 200),
        ("d", 3, 429),
    ):
        assert get(app, address=f"192.0.2.{address}", headers={"X-User": user}).status_code == status


def test_functions_in_front_of_the_limits() -> None:
    """What was registered before `init_app` runs before the limits, so keys can use it; the others run after them."""
    app, order = Flask("shop"), []

    @app.before_request
    def authenticate() -> None:
        g.user = request.headers.get("X-User", "")

    limits = RateLimits(app, default="1/minute", key=lambda request: g.user, clock=ManualClock())
    app.before_request(lambda: order.append(g.rate_limit))
    app.add_url_rule("/", view_func=page())
    assert [get(app, headers={"X-User": user}).status_code for user in ("ann", "bob", "ann")] == [200, 200, 429]
    assert [decision.allowed for decision in order] == [True, True]
    assert limits.enabled


def test_answers_in_front_of_the_limits() -> None:
    """An authentication that answers itself is limited too: by the default, and by address where keys are functions."""
    app = Flask("shop")
    app.before_request(lambda: None if request.headers.get("X-User") else ("who are you?", 401))
    limits = RateLimits(app, default="2/minute", key=lambda request: request.headers["X-User"], clock=ManualClock())
    app.add_url_rule("/", view_func=page())
    app.add_url_rule("/health", "health", limits.exempt(page()))
    assert statuses(app, 3) == [401, 401, 429]
    assert statuses(app, 3, headers={"X-User": "ann"}) == [200, 200, 429]
    assert statuses(app, 3, "/health") == [401] * 3


def test_mounted_applications() -> None:
    """They are limited by the default."""
    app = Flask("shop")

    def other(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"other"

    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/other": other})  # type: ignore[method-assign]
    RateLimits(app, default="2/minute", clock=ManualClock())
    app.add_url_rule("/", view_func=page())
    answers = [get(app, "/other"), get(app), get(app, "/other")]
    assert [(answer.status_code, answer.data[:5]) for answer in answers] == [
        (200, b"other"), (200, b"hello"), (429, b'{"tit'),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------- what is answered


def test_the_decision_is_in_g() -> None:
    app, limits = make()
    seen = []

    @app.route("/")
    @limits.limit("5/minute")
    def view() -> str:
        seen.append(g.rate_limit)
        return "hello"

    answer = get(app)
    assert seen[0].remaining == 4 and answer.headers["X-RateLimit-Remaining"] == "4"


@pytest.mark.parametrize("how", ["abort", "raise", "error handler", "after_request", "stream"])
def test_headers_are_on_every_answer(how: str) -> None:
    """Errors, answers of error handlers, streams, and even if a later function of the application fails."""
    app, _ = make(default="5/minute")

    @app.route("/")
    def view() -> Any:
        if how == "abort":
            flask.abort(418)
        if how == "stream":
            return flask.Response(iter(["a", "b"]))
        if how != "after_request":
            raise LookupError
        return "hello"

    if how == "error handler":
        app.register_error_handler(LookupError, lambda error: ("gone", 410))
    if how == "after_request":
        fails = iter([LookupError])

        @app.after_request
        def fail(response: flask.Response) -> flask.Response:
            for error in fails:
                raise error
            return response

    answer = get(app)
    expected = {"abort": 418, "raise": 500, "error handler": 410, "after_request": 500, "stream": 200}
    assert answer.status_code == expected[how]
    assert answer.headers.getlist("X-RateLimit-Remaining") == ["4"]
    assert left(app) == 3


def test_the_tightest_limit_is_told() -> None:
    """All limits of a request are one decision: a refused request spends none of them."""
    app, limits = make()
    pages = limits.limit("3/minute", scope="all")(Blueprint("pages", __name__))
    pages.add_url_rule("/a", "a", limits.limit("1/minute")(page()))
    pages.add_url_rule("/b", "b", page())
    app.register_blueprint(pages)
    assert [get(app, path).status_code for path in ("/a", "/a", "/a", "/b", "/b", "/b")] == [
        200,
        429,
        429,
        200,
        200,
        429,
    ]
    assert get(app, "/a").headers["X-RateLimit-Limit"] in ("1", "3")


def test_on_denied() -> None:
    """It gives anything that a view may return; None is the 429."""
    app, limits = make(on_denied=lambda request, decision: None)

    async def busy(request: flask.Request, decision: Any) -> Any:
        return {"again in": decision.retry_after, "path": request.path}, 503

    app.add_url_rule("/", view_func=limits.limit("1/minute", on_denied=busy)(page()))
    app.add_url_rule("/plain", "plain", limits.limit("1/minute")(page()))
    get(app), get(app, "/plain")
    answer = get(app)
    assert (answer.status_code, answer.json) == (503, {"again in": 60.0, "path": "/"})
    assert answer.headers["Retry-After"] == "60" and answer.headers["X-RateLimit-Remaining"] == "0"
    assert get(app, "/plain").status_code == 429


@pytest.mark.parametrize("kind", [429, RateLimitExceeded, HTTPException])
def test_error_handlers_of_the_application(kind: Any) -> None:
    """The refusal is an exception that they see, with the decision; what clients need is added to their answer."""
    app, _ = make(default="1/minute")

    @app.errorhandler(kind)
    def sorry(error: RateLimitExceeded) -> Any:
        return f"{error.description} ({error.decision.limit}, {error.retry_after})", 429

    @app.after_request
    def cors(response: flask.Response) -> flask.Response:
        response.headers["Access-Control-Allow-Origin"] = "*"
        return response

    app.add_url_rule("/", view_func=page())
    get(app)
    answer = get(app)
    assert answer.text == "Rate limit exceeded (1/minute); retry in 60 s (1, 60)"
    assert answer.headers["Retry-After"] == "60" and answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Access-Control-Allow-Origin"] == "*"


# ----------------------------------------------------------------------------------------------------- when it counts


def counting_errors(view: Callable[..., Any], **options: Any) -> tuple[Flask, Callable[[], int]]:
    app, limits = make()
    limit = limits.limit("5/minute", count_if=lambda response: response.status_code >= 400)
    app.add_url_rule("/", "view", limit(view))
    [limiter] = limits.known_limiters()
    return app, lambda: limiter.blocking.peek("192.0.2.1", 0).remaining


def raising() -> str:
    raise LookupError


@pytest.mark.parametrize("propagate", [True, False])
def test_count_if_of_a_view_that_raises(propagate: bool) -> None:
    app, remaining = counting_errors(raising)
    app.config["PROPAGATE_EXCEPTIONS"] = propagate
    if propagate:
        with pytest.raises(LookupError):
            get(app)
    else:
        assert get(app).status_code == 500
    assert remaining() == 4


def test_count_if_of_the_final_answer() -> None:
    """What an error handler or a later function makes of it, and with Flask's response beside it."""
    app, remaining = counting_errors(raising)
    app.register_error_handler(LookupError, lambda error: ("fine", 200))
    get(app)
    assert remaining() == 5
    app, limits = make()
    seen: list[Any] = []
    app.add_url_rule("/", "view", limits.limit("5/minute", count_if=seen.append)(page()))
    get(app)
    assert seen[0].native.get_data() == b"hello" and seen[0].headers["content-type"].startswith("text/html")


def test_count_if_of_a_stream() -> None:
    """Settled with its first bytes, also if the client leaves then."""
    app, remaining = counting_errors(lambda: flask.Response(iter(["a"] * 3)))
    answer = app.test_client().get("/", environ_base={"REMOTE_ADDR": "192.0.2.1"}, buffered=False)
    assert next(answer.iter_encoded()) == b"a" and remaining() == 5
    answer.close()
    assert remaining() == 5


def test_timeout_waits() -> None:
    clock = WatchedClock()
    app, limits = make(clock=clock)
    app.add_url_rule("/", view_func=limits.limit("1/minute", timeout=90.0)(page()))
    get(app)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, app)
        until(lambda: clock.sleeping)
        clock.advance(60.0)
        assert waiting.result().status_code == 200


# ---------------------------------------------------------------------------------------------------- asked by hand


def test_check() -> None:
    """Costs that a view knows late: taken each time, refused as a 429, and what was taken before stays taken."""
    app, limits = make()
    graphql = limits.limit("10/minute", scope="graphql")

    @app.route("/graphql", methods=["POST"])
    @limits.limit("9/minute")
    def query() -> Any:
        decision = graphql.check(cost=int(request.args["cost"]))
        return {"left": decision.remaining, "g": g.rate_limit.remaining}

    assert get(app, "/graphql?cost=4", "POST").json == {"left": 6, "g": 6}
    refused = get(app, "/graphql?cost=7", "POST")
    assert refused.status_code == 429 and refused.headers["X-RateLimit-Limit"] == "10"
    assert refused.headers["Retry-After"] == "6"
    assert get(app, "/graphql?cost=11", "POST").status_code == 429
    assert get(app, "/graphql?cost=0", "POST").json == {"left": 6, "g": 5}


def test_block_of_code() -> None:
    app, limits = make(on_denied=lambda request, decision: ("not now", 503))
    exports = limits.limit("1/minute", scope="exports")

    @app.route("/")
    def view() -> str:
        with exports as decision:
            return f"{decision.remaining} left"

    assert get(app).text == "0 left"
    assert (get(app).status_code, get(app).text) == (503, "not now")


def test_limited_functions_that_are_no_views() -> None:
    """They count once for a request, however often they are called."""
    app, limits = make()

    @limits.limit("2/minute", scope="search")
    def search() -> str:
        return "found"

    app.add_url_rule("/", "index", lambda: search() + search())
    assert statuses(app, 3) == [200, 200, 429]


def test_asked_where_there_is_no_request() -> None:
    app, limits = make()
    limited = limits.limit("1/minute", scope="x")(page())
    with pytest.raises(SetupError, match="outside of a request"):
        limited()
    with app.test_request_context(environ_base={"REMOTE_ADDR": "192.0.2.1"}):
        assert limited() == "hello"
        with pytest.raises(RateLimitExceeded):
            limits.limit("1/minute", scope="x").check()
    limits.enabled = False
    assert limited() == "hello"


# ------------------------------------------------------------------------------------------------------------ set-up


def test_app_factory() -> None:
    """One object for several applications: they share the store."""
    limits = RateLimits(default="1/minute", clock=ManualClock())
    apps = [Flask("one"), Flask("two")]
    for app in apps:
        limits.init_app(app)
        limits.init_app(app)
        app.add_url_rule("/", view_func=page())
    assert [get(app).status_code for app in apps] == [200, 429]


@pytest.mark.parametrize("above", [True, False])
def test_never_installed(above: bool) -> None:
    """A limited view does not run without its limit, whatever the order of the decorators."""
    app, limits = Flask("shop"), RateLimits(default="1/minute")
    app.testing = True
    limited = limits.limit("5/minute")
    view: Any = lambda: "hello"  # noqa: E731
    app.add_url_rule("/", "view", view if above else limited(view))
    if above:
        limited(view)
    app.add_url_rule("/other", "other", page())
    with pytest.raises(SetupError, match="init_app"):
        get(app)
    assert get(app, "/other").status_code == 200


def test_counted_twice() -> None:
    app, _ = make(default="5/minute")
    with pytest.raises(SetupError, match="name="):
        RateLimits(app, default="5/minute")
    other = RateLimits(app, default="3/minute", name="other", clock=ManualClock())
    app.add_url_rule("/", view_func=page())
    assert get(app).headers["X-RateLimit-Limit"] == "3"
    other.enabled = False
    assert get(app).headers["X-RateLimit-Limit"] == "5"


def test_mistakes() -> None:
    app, limits = make()
    with pytest.raises(ValueError, match="minut"):
        limits.limit("5 per minut")
    wrong: tuple[Any, ...] = ("view", dict)
    for target in wrong:
        with pytest.raises(SetupError, match="view or on a blueprint, got"):
            limits.limit("5/minute")(target)
    for mark in (limits.limit("5/minute"), limits.exempt):
        with pytest.raises(SetupError, match=r"whole application is RateLimits\(app, default"):
            mark(app)
    with pytest.raises(TypeError, match="stroe"):
        RateLimits(stroe="redis://")  # type: ignore[call-arg]


def test_switched_off() -> None:
    app, limits = make(default="1/minute", enabled=False)
    app.add_url_rule("/", view_func=page())
    app.add_url_rule("/own", "own", limits.limit("1/minute")(lambda: str(g.rate_limit)))
    assert statuses(app, 3) == [200] * 3
    assert get(app, "/own").text == "None"


def test_forged_addresses(caplog: pytest.LogCaptureFixture) -> None:
    """Forwarded headers count only from a trusted proxy; a private peer that sends them untrusted is warned of."""
    app, _ = make(default="1/minute", trusted_proxies=["10.0.0.0/8"])
    app.add_url_rule("/", view_func=page())
    get(app)
    assert {get(app, headers=headers).status_code for headers in FORGED} == {429}
    forged = [{"X-Forwarded-For": f"1.2.3.4, 198.51.100.{n}"} for n in (1, 1, 2)]
    assert [get(app, headers=headers, address="10.0.0.1").status_code for headers in forged] == [200, 429, 200]
    app, _ = make(default="1/minute")
    app.add_url_rule("/", view_func=page())
    with caplog.at_level(logging.WARNING):
        assert [get(app, headers=headers, address="10.0.0.1").status_code for headers in forged] == [200, 429, 429]
    assert "trusted_proxies=['10.0.0.1']" in caplog.text


def test_the_shortcut_decides_as_the_rule_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """`admit_at_once` leaves the same traces as `admit`, for each kind of plain limit."""

    def traces(**options: Any) -> list[Any]:
        app, limits = make(trusted_proxies=["10.0.0.0/8"])
        app.add_url_rule("/", view_func=limits.limit("2/minute", **options)(page()), methods=["GET", "OPTIONS"])
        preflight = {"Access-Control-Request-Method": "GET"}
        answers = [
            get(app, method="OPTIONS", headers=preflight),
            get(app, headers={"X-User": "ann"}),
            get(app),
            get(app),
        ]
        answers.append(get(app, address="10.0.0.1", headers={"X-Forwarded-For": "198.51.100.9"}))
        for answer in answers:
            answer.headers.pop("X-RateLimit-Reset", None)  # by the clock on the wall
        return [(answer.status_code, sorted(answer.headers.items())) for answer in answers]

    variants: list[dict[str, Any]] = [{}, {"key": "header:X-User"}, {"count_if": lambda response: False}]
    shortcut = [traces(**options) for options in variants]
    plain = Limit.__init__

    def without_shortcut(self: Limit, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.plain = False

    monkeypatch.setattr(Limit, "__init__", without_shortcut)
    assert [traces(**options) for options in variants] == shortcut


# ---------------------------------------------------------------------------------------------------------- commands


@pytest.mark.server
def test_commands(redis_server: Server) -> None:
    """They work in a process that has served no request: the routes tell which limits there are."""

    def fresh() -> Flask:
        app = Flask("shop")
        limits = RateLimits(app, store=redis_server.url, default="5/minute", key="header:X-API-Key")
        app.add_url_rule("/search/<word>", "search", limits.limit("3/minute", key="address")(lambda word: word))
        return app

    def run(*words: str) -> str:
        result = fresh().test_cli_runner().invoke(args=["headgate", *words])
        assert result.exit_code == 0, result.output
        return str(result.output)

    assert run("rules").splitlines() == [
        "ROUTE                        LIMIT     KEY               SCOPE",
        "GET /search/<word>           3/minute  address           GET /search/<word>",
        "GET /static/<path:filename>  5/minute  header:x-api-key  default",
        "(no route)                   5/minute  header:x-api-key  default",
    ]
    app = fresh()
    get(app, "/search/x"), get(app, headers={"X-API-Key": "secret"})
    assert "2 of 3" in run("show", "192.0.2.1") and "4 of 5" in run("show", "secret")
    assert "forgotten" in run("reset", "192.0.2.1")
    assert "3 of 3" in run("show", "192.0.2.1") and "4 of 5" in run("show", "secret")
    for key in ("\0", "x" * 5000):  # no addresses
        assert "5 of 5" in run("show", key) and "forgotten in 1 limits" in run("reset", key)
    for key in ("", " "):
        for action in ("show", "reset"):
            result = fresh().test_cli_runner().invoke(args=["headgate", action, key])
            assert result.exit_code == 1 and "give the key of a client" in result.output
    run("reset", "secret")
    assert left(app, headers={"X-API-Key": "secret"}) == 4


# --------------------------------------------------------------------------------------------------------- exactness


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(count)

    def wait_and_call(number: int) -> Any:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(wait_and_call, range(count)))


@pytest.mark.server
@pytest.mark.parametrize("kind", ["plain", "async", "two limits"])
def test_exact_in_threads(kind: str, redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20, in two applications that share a Redis."""
    apps = []
    for _ in range(2):
        app = Flask("shop")
        limits = RateLimits(app, store=redis_server.url)

        @limits.limit("20/hour")
        async def async_view() -> str:
            return "hello"

        view: Any = async_view if kind == "async" else limits.limit("20/hour")(page())
        app.add_url_rule("/", "view", limits.limit("40/hour")(view) if kind == "two limits" else view)
        apps.append(app)
    found = at_once(60, lambda number: get(apps[number % 2]).status_code)
    assert sorted(found) == [200] * 20 + [429] * 40


@pytest.mark.server
def test_one_round_trip(redis_server: Server) -> None:
    """A request with three limits of one subject asks Redis once."""
    app = Flask("shop")
    limits = RateLimits(app, store=redis_server.url)
    pages = limits.limit("30/hour", scope="pages")(Blueprint("pages", __name__))
    pages.add_url_rule("/", "view", limits.limit(["20/hour", "5/second"])(limits.limit("40/day")(page())))
    app.register_blueprint(pages)
    get(app)
    before = redis_server.calls("evalsha")
    get(app)
    assert redis_server.calls("evalsha") == before + 1


SHOP = """
from flask import Flask
from headgate.web.flask import RateLimits

app = Flask("shop")
limits = RateLimits(app, store={url!r})

@app.route("/")
@limits.limit("20/hour")
def index():
    return "hello"
"""


@pytest.mark.server
def test_exact_under_gunicorn(redis_server: Server, tmp_path: Path) -> None:
    """Two processes with threads, and a client for each request."""
    source = SHOP.format(url=redis_server.url)
    with served(tmp_path, source, "gunicorn", "--workers=2", "--threads=8", "shop:app") as url:
        answers = at_once(60, lambda _: httpx.get(url, timeout=60))
    assert sorted(answer.status_code for answer in answers) == [200] * 20 + [429] * 40
    assert {answer.headers["X-RateLimit-Remaining"] for answer in answers} == {str(n) for n in range(20)}


@pytest.mark.parametrize("style", ["x", None])
def test_first_requests_and_later_ones(style: Any) -> None:
    """The first requests are looked at for mistakes of the set-up; later ones get the same answers by a shorter way."""
    app = Flask("later")
    limits = RateLimits(app, headers=style)

    @app.get("/")
    @limits.limit("150/30d")
    def root() -> str:
        return "hello"

    client = app.test_client()
    answers = [client.get("/") for _ in range(151)]
    assert [answer.status_code for answer in answers] == [200] * 150 + [429]
    told = [answer.headers.get("X-RateLimit-Remaining") for answer in answers]
    assert told == ([*map(str, range(149, -1, -1)), "0"] if style else [None] * 151)
    assert answers[-1].headers["Retry-After"] and answers[-1].mimetype == "application/problem+json"
