"""Litestar: a limit for every handler, a tighter one for a search, and one for failed logins only.

Needs `pip install 'headgate[litestar]'`. Serve it with `litestar --app web_litestar:app run`; as a program it makes
some requests to itself and prints the answers.
"""

from typing import Any

from litestar import Litestar, Request, Response, get, post
from litestar.testing import TestClient

from headgate.web.litestar import RateLimits

limits = RateLimits(default="100/minute")  # store="redis://..." for more than one process


@get("/search", guards=[limits.limit(["2/second", "5/minute"])])
async def search(request: Request[Any, Any, Any]) -> str:
    return f"{request.state.rate_limit.remaining} left"


@post("/login", guards=[limits.limit("3/minute", count_if=lambda response: response.status_code == 401)])
async def login(request: Request[Any, Any, Any]) -> Response[str]:
    right = (await request.json())["password"] == "secret"
    return Response("welcome" if right else "wrong password", status_code=200 if right else 401)


app = Litestar([search, login], plugins=[limits])


def main() -> None:
    with TestClient(app) as client:
        for _ in range(3):
            answer = client.get("/search")
            print("search:", answer.status_code, answer.text)
        for password in ["secret", "a", "secret", "b", "c", "secret"]:
            print("login:", client.post("/login", json={"password": password}).status_code)
        answer = client.get("/nothing")
        print("nothing:", answer.status_code, answer.headers["x-ratelimit-remaining"], "of the default left")


if __name__ == "__main__":
    main()
