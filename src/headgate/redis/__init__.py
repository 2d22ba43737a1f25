"""Calls of scripts on a Redis, from threads and from event loops.

backend.py       one rule of a limiter: what its calls do, and the backends for threads and for asyncio
script.py        the Lua of a limiter, and commands as bytes
execute.py       how a call is made: breaker, server, retries; a plan (see `headgate._plan`) that the executors drive
sync_client.py   SyncExecutor and its connections, for threads
async_client.py  AsyncExecutor, for an event loop
batching.py      its connections: many calls in one round trip
topology.py      which server to ask: single, Sentinel or Cluster
url.py           what a URL says of servers, connections and time-outs
breaker.py       calls are not sent to a server that does not answer
probe.py         looks in the background whether that server is back
health.py        a health check of a server
pubsub.py        messages that wake waiters in other processes
"""
