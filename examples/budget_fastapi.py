"""A budget of tokens for each user of a streaming endpoint: the stream of one that has no more ends."""

import asyncio
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse, Response, StreamingResponse

from headgate import AsyncBudget, BudgetExceeded, RateLimited

app = FastAPI()
budget = AsyncBudget(requests="10/minute", tokens="60/minute", name="chat")  # add store="redis://..." for all workers


@app.post("/chat")
async def chat(x_user: str = Header()) -> Response:
    """Reserve what an answer usually costs; `spend` reserves more while the answer grows."""
    try:
        hold = await budget.reserve(x_user, requests=1, tokens=8, timeout=0)
    except RateLimited as refused:
        wait = str(int(refused.decision.retry_after) + 1)
        return JSONResponse({"detail": "no tokens left"}, 429, headers={"Retry-After": wait})

    async def words() -> AsyncIterator[str]:
        async with hold:
            await hold.spend(requests=1)
            try:
                for _ in range(50):  # the model's answer
                    await hold.spend(tokens=1)
                    yield "word "
            except BudgetExceeded:
                yield "[no tokens left]"

    return StreamingResponse(words(), media_type="text/plain")


async def main() -> None:
    """Ask twice as a user that has tokens for one answer and a bit."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(3):
            answer = await client.post("/chat", headers={"X-User": "ada"})
            print(answer.status_code, answer.text[-30:], await budget.remaining("ada"))


if __name__ == "__main__":
    asyncio.run(main())
