"""HTTP clients that send every request with a member of a pool, learn from the answer, and retry where that is safe.

    client = httpx.Client(transport=PoolTransport(pool, header("Authorization", "Bearer {}")))

See `headgate.clients.httpx` and `headgate.clients.requests`.
"""
