"""Logins of a FastAPI application: failures are held by address and by username, and a success forgets its own.

Needs `pip install 'headgate[fastapi]'`. Serve it with `uvicorn web_login_fastapi:app`; as a program it makes some
requests to itself and prints the answers.
"""

import asyncio
import hashlib
import hmac

import httpx
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

from headgate.web.login import LoginRefused, LoginThrottle

app = FastAPI()
throttle = LoginThrottle(
    per_username="3/15 minutes", per_address="20/hour"
)  # store="redis://...", trusted_proxies=[...]


class Credentials(BaseModel):
    username: str
    password: str


def hashed(password: str) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", password.encode(), b"a salt for each user", 1000)


USERS = {"ann": hashed("correct horse"), "bob": hashed("battery staple")}


def is_right(given: Credentials) -> bool:
    """As much work for a username that does not exist: the time of an answer must not tell."""
    return hmac.compare_digest(hashed(given.password), USERS.get(given.username, bytes(32)))


@app.exception_handler(LoginRefused)
async def too_many(request: Request, error: LoginRefused) -> Response:
    status, headers, body = error.answer()
    return Response(body, status, headers)


@app.post("/login")
async def login(request: Request, given: Credentials) -> dict[str, str]:
    async with throttle.attempt(request, given.username) as attempt:
        if not is_right(given):
            raise HTTPException(401, "wrong username or password")
        attempt.succeeded()
        return {"welcome": given.username}


async def tries(address: str, username: str, *passwords: str) -> list[int]:
    transport = httpx.ASGITransport(app=app, client=(address, 50000))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        sent = [{"username": username, "password": password} for password in passwords]
        return [(await client.post("/login", json=data)).status_code for data in sent]


async def main() -> None:
    home, elsewhere = "192.0.2.7", "198.51.100.66"
    found = await tries(home, "ann", "correct horse", "oops", "oops", "correct horse", "oops")
    print("typing errors are forgotten:", found)
    print("guesses are held:", await tries(elsewhere, "ANN", "a", "b", "c", "d"))
    print("ann still gets in where she was before:", await tries(home, "ann", "correct horse"))
    print("names that do not exist look the same:", await tries(home, "eve", "a", "b", "c", "d"))


if __name__ == "__main__":
    asyncio.run(main())
