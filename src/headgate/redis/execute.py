"""One question to Redis, wherever it is: follow the slot, load the script, try again where that is safe.

Safe is what the server itself says it has not done (NOSCRIPT, MOVED, ASK, TRYAGAIN, LOADING, READONLY, CLUSTERDOWN)
and what was never sent. A reply that was lost is not: the script may have run, so the call fails and the policy
answers. A check is spent once at most, never twice.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Any, NamedTuple

from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from headgate.redis.lua import Eval, Lua
from headgate.redis.script import Call, Script
from headgate.redis.topology import Send, Topology, Unreached, cluster_is_ok, pack
from headgate.redis.url import Address

PAUSE = 0.005  # seconds before a server that said "not now" is asked again


# What counts as no answer: silence, and a Cluster that says it is down, which was asked again until time was over.
NO_REPLY_ERRORS = (ConnectionError, TimeoutError, ClusterDownError, MasterDownError, OSError)


class ScriptRequest(NamedTuple):
    """A request: this call of that script to that server."""

    address: Address
    script: Script | Lua
    call: Any  # a `Call` of a Script, an `Eval` of a Lua
    send_source: bool  # send the script itself: the server does not know it
    asking: bool  # the slot is on its way to this server
    is_retry: bool  # some of the time is gone


Request = Send | ScriptRequest | float  # a float: sleep that many seconds


def execute(topology: Topology, script: Script | Lua, call: Call | Eval, until: float) -> Generator[Request, Any, Any]:
    """The reply of *script* to *call*; raises what stood in the way once it is past *until* (monotonic)."""
    slot = script.slot(call.key) if topology.sliced else 0
    whole, detour, again = False, None, False
    problem: RedisError
    while True:
        address = detour or topology.address(slot) or (yield from topology.discover(slot))
        try:
            return (yield ScriptRequest(address, script, call, whole, detour is not None, again))
        except NoScriptError as error:  # a new server, or its cache was flushed
            if whole:
                raise
            whole, again, problem = True, True, error
            continue
        except MovedError as error:  # before AskError, whose child it is
            topology.moved(error.slot_id, Address(error.host or address.host, error.port))
            problem = error
        except AskError as error:
            detour, again, problem = Address(error.host or address.host, error.port), True, error
            if monotonic() > until:
                raise
            continue
        except TryAgainError as error:
            problem = error
            yield PAUSE
        except (BusyLoadingError, ReadOnlyError, ClusterDownError, MasterDownError, Unreached) as error:
            if not topology.lost(address) or monotonic() + PAUSE > until:
                raise
            problem = error
            yield PAUSE
            yield from topology.discover(slot)
        except (RedisError, OSError) as error:
            known = topology.lost(address)  # the next call finds out where to go; this one may have been answered
            refused = isinstance(error, ResponseError)
            safe = (refused and known and "read only replica" in str(error)) or (not refused and script.repeatable)
            if not safe or monotonic() + PAUSE > until:
                raise
            problem = ConnectionError(str(error))
            yield PAUSE
        detour, again = None, True
        if monotonic() > until:
            raise problem


def probe(topology: Topology, slot: int, patience: float) -> Generator[Send, Any, None]:
    """Whether *slot* can be asked for again, in the time that a check has: returns if so, raises if not."""
    address = yield from topology.discover(slot)
    yield Send(address, pack("PING"))  # connects, which may take longer
    begun = monotonic()
    yield Send(address, pack("EVAL", "return 1", 0))  # and not PING: a server may answer that and hold scripts up
    if (took := monotonic() - begun) > patience:
        raise TimeoutError(f"it answers, but in {took:.2f} s, and a check has {patience} s")
    if topology.sliced and not cluster_is_ok((yield Send(address, pack("CLUSTER", "INFO")))):
        raise ClusterDownError("CLUSTERDOWN as the server itself says")
