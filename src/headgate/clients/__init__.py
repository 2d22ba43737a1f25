"""HTTP clients that send every request with a member of a pool, learn from the answer, and retry where that is safe.

    client = httpx.Client(transport=PoolTransport(pool, header("Authorization", "Bearer {}")))

httpx.py      transports for httpx
requests.py   an adapter for requests
aiohttp.py    a client middleware for aiohttp
sender.py     the loop of attempts that all share
authorize.py  how a member is written into a request
retries.py    when a request is sent again
"""
