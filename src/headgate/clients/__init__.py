"""HTTP clients that take a member of a pool for every request, learn from the answer, and try again where that is safe.

    client = httpx.Client(transport=PoolTransport(pool, header("Authorization", "Bearer {}")))

See `headgate.clients.httpx` and `headgate.clients.requests`.
"""
