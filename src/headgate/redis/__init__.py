"""Calls of scripts on a Redis, from threads and from event loops.

script.py        the Lua of a limiter, commands as bytes, and the Cluster slot of a key
joint.py         the Lua of several limiters at once, and of a limiter that books
execute.py       how a call is made: breaker, server, retries, MOVED and ASK; a plan that executors drive
sync_client.py   SyncExecutor and its connections, for threads
shared_trips.py  SharedTrips: threads that ask a server at the same moment share a trip
async_client.py  AsyncExecutor, for an event loop
batching.py      BatchSender: an event loop's connections, round trips and time-outs; refunds of cancelled calls
merging.py       calls that travel together are few commands
topology.py      which server to ask: single, Sentinel or Cluster
url.py           what a URL says of servers, connections and time-outs
health.py        a health check of a server, and what a probe asks it
servers.py       what every server is asked, each primary of a Cluster: its figures, to remove the keys of a prefix
pubsub.py        messages that wake waiters in other processes
"""
