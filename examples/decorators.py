"""A limit around functions and blocks."""

import asyncio

from headgate import AsyncLimiter, Limiter, RateLimited

limiter = Limiter("2/minute")


@limiter.limit(key=lambda user, text: f"user:{user}")
def post(user: int, text: str) -> str:
    return f"{user}: {text}"


print(post(1, "hello"))
print(post(1, "hello again"))
try:
    post(1, "and again")
except RateLimited as refused:
    print("denied:", refused)
print(post(2, "somebody else is welcome"))


async def search() -> None:
    searches = AsyncLimiter("1/minute")
    async with searches.limit(key="search"):
        print("searching")
    try:
        async with searches.limit(key="search"):
            raise AssertionError("the second one is denied")
    except RateLimited as refused:
        print("denied:", refused)


asyncio.run(search())
