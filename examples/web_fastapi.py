"""FastAPI: a limit for every client, a tighter one for a search, one for each user, and one for failed logins only.

Needs `pip install 'headgate[fastapi]'` and uvicorn. Serve it with `uvicorn web_fastapi:app`; as a program it
serves itself, makes some requests and prints the answers.
"""

from __future__ import annotations

import threading
import time
from typing import Annotated

import httpx
import uvicorn
from fastapi import Depends, FastAPI, Form, HTTPException, Request

from headgate.web.fastapi import RateLimits

app = FastAPI()
limits = RateLimits(default="100/minute")
limits.install(app)


@app.get("/search")
@limits.limit("2/minute")
def search(words: str) -> list[str]:
    return words.split()


async def sign_in(request: Request) -> None:
    user = request.headers.get("X-User")
    if not user:
        raise HTTPException(401)
    request.state.user = user


def by_user(request: Request) -> str:
    return str(request.state.user)


@app.get("/items/{item}", dependencies=[Depends(sign_in), Depends(limits.limit("2/minute", key=by_user))])
async def item(item: int) -> int:
    return item


@app.post("/login")
@limits.limit("2/minute", count_if=lambda response: response.status_code == 401)
async def login(password: Annotated[str, Form()]) -> str:
    if password != "correct horse":
        raise HTTPException(401)
    return "welcome"


def main() -> None:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(3):
                answer = http.get("/search", params={"words": "a b"})
                print("search:", answer.status_code, answer.headers["X-RateLimit-Remaining"], "left")
            for number, user in enumerate(["ann", "ann", "ann", "bob"]):
                print(f"item {number} for {user}:", http.get(f"/items/{number}", headers={"X-User": user}).status_code)
            for password in ["correct horse", "correct horse", "guess", "guess", "guess"]:
                print(f"login with {password}:", http.post("/login", data={"password": password}).status_code)
            print("elsewhere:", http.get("/nowhere").headers["X-RateLimit-Remaining"], "left of the default")
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
