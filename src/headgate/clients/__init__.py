"""HTTP clients that send every request with a member of a pool, learn from the answer, and retry where that is safe.

    client = httpx.Client(transport=PoolTransport(pool, header("Authorization", "Bearer {}")))

httpx.py      transports for httpx
requests.py   an adapter for requests
aiohttp.py    a client middleware for aiohttp
llm.py        transports for httpx that keep a fleet inside the limits of an LLM server, by a budget
usage.py      what the answers of LLM servers say about tokens and limits
sender.py     the loop of attempts that all share
authorize.py  how a member is written into a request
retries.py    when a request is sent again
"""
