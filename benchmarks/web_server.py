"""An application under a real server: python -m benchmarks.web_server FRAMEWORK LIMITER PORT.

FRAMEWORK is fastapi (on uvicorn, with uvloop and httptools) or flask (on gunicorn, one worker with threads). LIMITER is
none, headgate, slowapi or flask-limiter: one limit in memory, which is never reached, with the defaults of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Never reached, and slow to give a permit back, so that requests meet a key that is known, as with quotas of real use.
QUOTA = "900000000/30 days"
THREADS = 4


def fastapi(limiter: str) -> Any:
    from fastapi import FastAPI, Request

    app = FastAPI()
    if limiter == "headgate":
        from headgate.web.fastapi import RateLimits

        limits = RateLimits()
        limits.install(app)

        @app.get("/hello")
        @limits.limit(QUOTA)
        async def limited() -> dict[str, str]:
            return {"message": "hello"}

    elif limiter == "slowapi":
        from slowapi import Limiter, _rate_limit_exceeded_handler
        from slowapi.errors import RateLimitExceeded
        from slowapi.util import get_remote_address

        peer = Limiter(key_func=get_remote_address)
        app.state.limiter = peer
        app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)  # type: ignore[arg-type]  # its type

        async def needs_request(request: Request) -> dict[str, str]:
            return {"message": "hello"}

        needs_request.__annotations__["request"] = Request  # it looks for the class, not for its name
        app.get("/hello")(peer.limit(QUOTA)(needs_request))
    else:

        @app.get("/hello")
        async def hello() -> dict[str, str]:
            return {"message": "hello"}

    return app


def flask(limiter: str) -> Any:
    from flask import Flask

    app = Flask("hello")
    decorate: Callable[[Any], Any] = lambda view: view  # noqa: E731
    if limiter == "headgate":
        from headgate.web.flask import RateLimits

        decorate = RateLimits(app).limit(QUOTA)
    elif limiter == "flask-limiter":
        from flask_limiter import Limiter
        from flask_limiter.util import get_remote_address

        decorate = Limiter(get_remote_address, app=app, storage_uri="memory://").limit(QUOTA)

    def hello() -> dict[str, str]:
        return {"message": "hello"}

    app.route("/hello")(decorate(hello))
    return app


def serve_fastapi(limiter: str, port: int) -> None:
    import uvicorn

    uvicorn.run(fastapi(limiter), port=port, loop="uvloop", http="httptools", log_level="error", access_log=False)


def serve_flask(limiter: str, port: int) -> None:
    options = {"bind": f"127.0.0.1:{port}", "worker_class": "gthread", "threads": THREADS, "loglevel": "critical"}
    base: Any = import_module("gunicorn.app.base").BaseApplication  # it has no types

    class Server(base):  # type: ignore[misc]
        def load_config(self) -> None:
            for name, value in options.items():
                self.cfg.set(name, value)

        def load(self) -> Any:
            return flask(limiter)

    Server().run()


if __name__ == "__main__":
    framework, limiter, port = sys.argv[1:]
    sys.argv[1:] = []  # gunicorn reads it
    {"fastapi": serve_fastapi, "flask": serve_flask}[framework](limiter, int(port))
