"""What every store promises, run against every store that there is.

`STORES` in `tests/support/stores.py` is the table of them; to add a store is to add a row there. Tests get a row as
`callers`, which makes limiters on that store, and each runs in both colours: called from threads, and from the tasks of
an event loop.

    callers        the rows that run everything: memory, one Redis, and each store to come
    any_callers    also the other ways to the same code: other servers, a client object, threads, Sentinels, Cluster

The promises: exact under threads, tasks and processes; the answers of an exact model; nothing stays behind for ever;
outages are answered by the policy, in time; waiting in line; keys that never share state; health. What is particular to
one store, such as its keys or its bound, is in `test_memory.py` and `test_redis.py`.
"""
