"""aiohttp: a limit for every handler, a tighter one for a search, and one for failed logins only.

Needs `pip install 'headgate[aiohttp]'`. Serve it with `python -m aiohttp.web web_aiohttp:application`; as a program it
makes some requests to itself and prints the answers.
"""

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from headgate.web.aiohttp import RateLimits


def application(arguments: object = None) -> web.Application:
    limits = RateLimits(default="100/minute")  # store="redis://..." for more than one process

    @limits.limit(["2/second", "5/minute"])
    async def search(request: web.Request) -> web.Response:
        return web.Response(text=f"{request['rate_limit'].remaining} left")

    @limits.limit("3/minute", count_if=lambda response: response.status_code == 401)
    async def login(request: web.Request) -> web.Response:
        if (await request.json())["password"] != "secret":
            raise web.HTTPUnauthorized
        return web.Response(text="welcome")

    app = web.Application(middlewares=[limits.middleware])
    app.add_routes([web.get("/search", search), web.post("/login", login)])
    return app


async def main() -> None:
    async with TestClient(TestServer(application())) as client:
        for _ in range(3):
            answer = await client.get("/search")
            print("search:", answer.status, await answer.text())
        for password in ["secret", "a", "secret", "b", "c", "secret"]:
            print("login:", (await client.post("/login", json={"password": password})).status)
        answer = await client.get("/nothing")
        print("nothing:", answer.status, answer.headers["X-RateLimit-Remaining"], "of the default left")


if __name__ == "__main__":
    asyncio.run(main())
