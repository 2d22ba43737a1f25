"""One application for each door: headgate's, and those of its peers, each set up as its documentation says.

All of them limit `/` to 20 requests an hour for each address, on the Redis at a URL. Nothing is imported before an
application is made, so a peer that is not installed is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

LIMIT = 20


@dataclass(frozen=True, slots=True)
class Door:
    """An application to make: *package* is what is measured, *kind* how a worker calls it."""

    name: str
    framework: str
    package: str
    kind: str  # wsgi (in threads), asgi, aiohttp or sanic (in an event loop)
    make: Callable[[str], Any]

    @property
    def ours(self) -> bool:
        return self.package == "headgate"


# ------------------------------------------------------------------------------------------------ FastAPI, Starlette


def _fastapi(*dependencies: Any, **options: Any) -> Any:
    fastapi = import_module("fastapi")
    app = fastapi.FastAPI(**options)
    app.get("/", dependencies=[fastapi.Depends(one) for one in dependencies])(_hello)
    return app


async def _hello() -> dict[str, str]:
    return {"message": "hello"}


def fastapi(url: str) -> Any:
    limits = import_module("headgate.web.fastapi").RateLimits(store=url)
    app = _fastapi(limits.limit("20/hour"))
    limits.install(app)
    return app


def fastapi_plain(url: str) -> Any:
    limits = import_module("headgate.web.fastapi").RateLimits(store=url)
    app = import_module("fastapi").FastAPI()
    limits.install(app)

    def root() -> dict[str, str]:  # runs in a thread
        return {"message": "hello"}

    app.get("/")(limits.limit("20/hour")(root))
    return app


def starlette(url: str) -> Any:
    limits = import_module("headgate.web.starlette").RateLimits(store=url)

    async def root(request: Any) -> Any:
        return import_module("starlette.responses").PlainTextResponse("hello")

    route = import_module("starlette.routing").Route("/", limits.limit("20/hour")(root))
    app = import_module("starlette.applications").Starlette(routes=[route])
    limits.install(app)
    return app


def asgi(url: str) -> Any:
    return import_module("headgate.web.asgi").RateLimitMiddleware(_hello_asgi, "20/hour", store=url)


async def _hello_asgi(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def slowapi(url: str) -> Any:
    peer, fast = import_module("slowapi"), import_module("fastapi")
    limiter = peer.Limiter(key_func=import_module("slowapi.util").get_remote_address, storage_uri=url)
    app = fast.FastAPI()
    app.state.limiter = limiter
    app.add_exception_handler(import_module("slowapi.errors").RateLimitExceeded, peer._rate_limit_exceeded_handler)

    async def root(request: Any) -> dict[str, str]:
        return {"message": "hello"}

    root.__annotations__["request"] = fast.Request
    app.get("/")(limiter.limit("20/hour")(root))
    return app


def fastapi_limiter(url: str) -> Any:
    peer, pyrate = import_module("fastapi_limiter.depends"), import_module("pyrate_limiter")
    redis = import_module("redis.asyncio").Redis.from_url(url)

    async def made() -> None:
        bucket = await pyrate.RedisBucket.init([pyrate.Rate(LIMIT, pyrate.Duration.HOUR)], redis, "fastapi-limiter")
        dependency.limiter = pyrate.Limiter(bucket)

    dependency = peer.RateLimiter(limiter=None)
    app = _fastapi(dependency)
    app.state.before = made  # its bucket is made in an event loop
    return app


def fastapi_redis_sdk(url: str) -> Any:
    os.environ["REDIS_URL"] = url
    peer, fast = import_module("redis_fastapi"), import_module("fastapi")
    app = fast.FastAPI()
    peer.FastAPIRedis(app).lifespan().rate_limiting()
    app.get("/", dependencies=[fast.Depends(peer.rate_limit("20/hour", scope="hello"))])(_hello)
    return app


def traffik(url: str) -> Any:
    backend = import_module("traffik.backends.redis.aioredis").RedisBackend(url, namespace="hello")
    throttle = import_module("traffik").HTTPThrottle(uid="hello", rate="20/hour")
    return _fastapi(throttle, lifespan=backend.lifespan)


# --------------------------------------------------------------------------------------------------------- Flask, WSGI


def _flask(decorate: Callable[[Any], Any]) -> Any:
    app = import_module("flask").Flask("hello")

    def root() -> str:
        return "hello"

    app.route("/")(decorate(app)(root))
    return app


def flask(url: str) -> Any:
    return _flask(lambda app: import_module("headgate.web.flask").RateLimits(app, store=url).limit("20/hour"))


def flask_success(url: str) -> Any:
    limits = import_module("headgate.web.flask").RateLimits
    return _flask(lambda app: limits(app, store=url).limit("20/hour", count_if=_succeeded))


def _succeeded(answer: Any) -> bool:
    return bool(answer.status_code == 200)


def wsgi(url: str) -> Any:
    return import_module("headgate.web.wsgi").RateLimitMiddleware(_hello_wsgi, "20/hour", store=url)


def _hello_wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("content-type", "text/plain")])
    return [b"hello"]


def _flask_limiter(url: str, strategy: str = "fixed-window", **limit: Any) -> Any:
    peer = import_module("flask_limiter")
    address = import_module("flask_limiter.util").get_remote_address
    return _flask(
        lambda app: peer.Limiter(address, app=app, storage_uri=url, strategy=strategy).limit("20/hour", **limit)
    )


def flask_limiter(url: str) -> Any:
    return _flask_limiter(url)


def flask_limiter_moving(url: str) -> Any:
    return _flask_limiter(url, "moving-window")


def flask_limiter_success(url: str) -> Any:
    return _flask_limiter(url, deduct_when=_succeeded)


def flask_limiter_on_headgate(url: str) -> Any:
    import_module("headgate.limits")
    return _flask_limiter(f"headgate+{url}")


def throttled(url: str) -> Any:
    peer, whole = import_module("throttled.contrib.flask"), import_module("throttled")
    address = import_module("throttled.contrib.flask.key_funcs").get_remote_address
    store = whole.RedisStore(server=url)
    return _flask(lambda app: peer.Limiter(whole.per_hour(LIMIT), app=app, store=store, key_func=address).limit())


# -------------------------------------------------------------------------------------------------------------- Django


def _django(url: str, view: Any, **settings: Any) -> Any:
    """A Django project in one module; *view* is made when the settings are known."""
    import sys

    module = sys.modules[__name__]
    given = {
        "ROOT_URLCONF": __name__,
        "ALLOWED_HOSTS": ["*"],
        "SECRET_KEY": "a benchmark's",
        "CACHES": {"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": url}},
        "INSTALLED_APPS": ["django.contrib.contenttypes", "django.contrib.auth"],
        "MIDDLEWARE": [],
        "DATABASES": {},
        **settings,
    }
    import_module("django.conf").settings.configure(**given)
    import_module("django").setup()
    module.urlpatterns = [import_module("django.urls").path("", view())]  # type: ignore[attr-defined]
    return import_module("django.core.handlers.wsgi").WSGIHandler()


def _ours_in_django(url: str, view: Any, **settings: Any) -> Any:
    apps = ["django.contrib.contenttypes", "django.contrib.auth", "headgate.web.django"]
    middleware = ["headgate.web.django.RateLimitMiddleware"]
    return _django(url, view, INSTALLED_APPS=apps, MIDDLEWARE=middleware, HEADGATE={"STORE": url}, **settings)


def _answer(request: Any = None) -> Any:
    return import_module("django.http").HttpResponse("hello")


async def _answer_later(request: Any) -> Any:
    return _answer()


def django(url: str) -> Any:
    return _ours_in_django(url, lambda: import_module("headgate.web.django").ratelimit(key="ip", rate="20/h")(_answer))


def django_async(url: str) -> Any:
    _ours_in_django(url, lambda: import_module("headgate.web.django").ratelimit(key="ip", rate="20/h")(_answer_later))
    return import_module("django.core.handlers.asgi").ASGIHandler()


def _rest(throttle: str) -> Callable[[], Any]:
    """A view of REST framework with the throttle class of this module."""

    def view() -> Any:
        views, response = import_module("rest_framework.views"), import_module("rest_framework.response")
        throttles = [import_module(throttle).AnonRateThrottle]

        def get(self: Any, request: Any) -> Any:
            return response.Response("hello")

        kept = {"get": get, "throttle_classes": throttles, "authentication_classes": [], "permission_classes": []}
        made: Any = type("Hello", (views.APIView,), kept)
        return made.as_view()

    return view


RATES = {"DEFAULT_THROTTLE_RATES": {"anon": "20/hour"}, "UNAUTHENTICATED_USER": None}


def rest_framework(url: str) -> Any:
    return _ours_in_django(url, _rest("headgate.web.django.rest_framework"), REST_FRAMEWORK=RATES)


def rest_framework_own(url: str) -> Any:
    return _django(url, _rest("rest_framework.throttling"), REST_FRAMEWORK=RATES)


def _ninja(throttle: str) -> Callable[[], Any]:
    def view() -> Any:
        api = import_module("ninja").NinjaAPI(urls_namespace="hello")

        def root(request: Any) -> str:
            return "hello"

        api.get("/", throttle=[import_module(throttle).AnonRateThrottle("20/h")])(root)
        return api.urls

    return view


def ninja(url: str) -> Any:
    return _ours_in_django(url, _ninja("headgate.web.django.ninja"))


def ninja_own(url: str) -> Any:
    return _django(url, _ninja("ninja.throttling"))


def django_ratelimit(url: str) -> Any:
    def view() -> Any:
        peer = import_module("django_ratelimit.decorators")
        return peer.ratelimit(key="ip", rate="20/h", block=True)(_answer)

    return _django(url, view)  # a refusal is a 403


def django_smart_ratelimit(url: str) -> Any:
    def view() -> Any:
        return import_module("django_smart_ratelimit").ratelimit(key="ip", rate="20/h", block=True)(_answer)

    return _django(url, view, RATELIMIT_BACKEND="redis", RATELIMIT_REDIS={"url": url})


# -------------------------------------------------------------------------------------- Litestar, Quart, aiohttp, Sanic


def _litestar(**options: Any) -> Any:
    litestar = import_module("litestar")

    async def root() -> str:
        return "hello"

    guards = options.pop("guards", None)
    return litestar.Litestar([litestar.get("/", guards=guards)(root)], **options)


def litestar(url: str) -> Any:
    limits = import_module("headgate.web.litestar").RateLimits(store=url)
    return _litestar(guards=[limits.limit("20/hour")], plugins=[limits])


def litestar_own(url: str) -> Any:
    config = import_module("litestar.middleware.rate_limit").RateLimitConfig(rate_limit=("hour", LIMIT))
    store = import_module("litestar.stores.redis").RedisStore.with_client(url=url)
    return _litestar(middleware=[config.middleware], stores={"rate_limit": store})


def _quart(decorate: Callable[[Any], Any]) -> Any:
    app = import_module("quart").Quart("hello")

    async def root() -> str:
        return "hello"

    app.route("/")(decorate(app)(root))
    return app


def quart(url: str) -> Any:
    return _quart(lambda app: import_module("headgate.web.quart").RateLimits(app, store=url).limit("20/hour"))


def quart_rate_limiter(url: str) -> Any:
    from datetime import timedelta

    peer, store = import_module("quart_rate_limiter"), import_module("quart_rate_limiter.redis_store")

    def decorate(app: Any) -> Any:
        peer.RateLimiter(app, store=store.RedisStore(url))
        return peer.rate_limit(LIMIT, timedelta(hours=1))

    return _quart(decorate)


def _aiohttp(decorate: Callable[[Any], Any], **options: Any) -> Any:
    web = import_module("aiohttp.web")

    async def root(request: Any) -> Any:
        return web.Response(text="hello")

    app = web.Application(**options)
    app.add_routes([web.get("/", decorate(root))])
    return app


def aiohttp(url: str) -> Any:
    limits = import_module("headgate.web.aiohttp").RateLimits(store=url)
    return _aiohttp(limits.limit("20/hour"), middlewares=[limits.middleware])


def aiohttp_ratelimiter(url: str) -> Any:
    peer = import_module("aiohttplimiter")
    # with redis-py: of coredis, its default, only old versions work with it
    limiter = peer.RedisLimiter(keyfunc=peer.default_keyfunc, uri=f"async+{url}", implementation="redispy")
    return _aiohttp(limiter.limit("20/hour"))


def sanic(url: str) -> Any:
    whole = import_module("sanic")
    app = whole.Sanic("hello")
    limits = import_module("headgate.web.sanic").RateLimits(app, store=url)

    async def root(request: Any) -> Any:
        return whole.text("hello")

    app.get("/")(limits.limit("20/hour")(root))
    return app


def sanic_limiter(url: str) -> Any:
    whole, peer = import_module("sanic"), import_module("sanic_limiter")
    app = whole.Sanic("hello")
    limiter = peer.Limiter(app, key_func=peer.get_remote_address, storage_uri=url)

    async def root(request: Any) -> Any:
        return whole.text("hello")

    app.get("/")(limiter.limit("20/hour")(root))
    return app


DOORS = [
    Door("FastAPI", "fastapi", "headgate", "asgi", fastapi),
    Door("FastAPI, plain endpoint", "fastapi", "headgate", "asgi", fastapi_plain),
    Door("Starlette", "starlette", "headgate", "asgi", starlette),
    Door("any ASGI", "", "headgate", "asgi", asgi),
    Door("slowapi", "fastapi", "slowapi", "asgi", slowapi),
    Door("fastapi-limiter", "fastapi", "fastapi-limiter", "asgi", fastapi_limiter),
    Door("fastapi-redis-sdk", "fastapi", "fastapi-redis-sdk", "asgi", fastapi_redis_sdk),
    Door("traffik", "fastapi", "traffik", "asgi", traffik),
    Door("Flask", "flask", "headgate", "wsgi", flask),
    Door("Flask, only successes count", "flask", "headgate", "wsgi", flask_success),
    Door("any WSGI", "", "headgate", "wsgi", wsgi),
    Door("Flask-Limiter", "flask", "Flask-Limiter", "wsgi", flask_limiter),
    Door("Flask-Limiter, moving window", "flask", "Flask-Limiter", "wsgi", flask_limiter_moving),
    Door("Flask-Limiter, only successes count", "flask", "Flask-Limiter", "wsgi", flask_limiter_success),
    Door("Flask-Limiter on headgate.limits", "flask", "headgate", "wsgi", flask_limiter_on_headgate),
    Door("throttled-py", "flask", "throttled-py", "wsgi", throttled),
    Door("Quart", "quart", "headgate", "asgi", quart),
    Door("quart-rate-limiter", "quart", "quart-rate-limiter", "asgi", quart_rate_limiter),
    Door("Django", "django", "headgate", "wsgi", django),
    Door("Django, async view", "django", "headgate", "asgi", django_async),
    Door("django-ratelimit", "django", "django-ratelimit", "wsgi", django_ratelimit),
    Door("django-smart-ratelimit", "django", "django-smart-ratelimit", "wsgi", django_smart_ratelimit),
    Door("REST framework", "djangorestframework", "headgate", "wsgi", rest_framework),
    Door("REST framework's own", "djangorestframework", "djangorestframework", "wsgi", rest_framework_own),
    Door("django-ninja", "django-ninja", "headgate", "wsgi", ninja),
    Door("django-ninja's own", "django-ninja", "django-ninja", "wsgi", ninja_own),
    Door("Litestar", "litestar", "headgate", "asgi", litestar),
    Door("Litestar's own", "litestar", "litestar", "asgi", litestar_own),
    Door("aiohttp", "aiohttp", "headgate", "aiohttp", aiohttp),
    Door("aiohttp-ratelimiter", "aiohttp", "aiohttp-ratelimiter", "aiohttp", aiohttp_ratelimiter),
    Door("Sanic", "sanic", "headgate", "asgi", sanic),
    Door("sanic-limiter", "sanic", "sanic-limiter", "asgi", sanic_limiter),
]
