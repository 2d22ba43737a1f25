"""What is counted: every family with its kind, its unit and its meaning. The Prometheus name follows from these.

Units are those of OpenTelemetry: ``s`` for seconds, ``{permit}`` for a count of permits. A counter only grows; a gauge
is as of now. `merge` says what several workers make of a gauge: the sum, or the largest or smallest of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge"]


class Family(NamedTuple):
    """One row of `FAMILIES`."""

    kind: Kind
    unit: str
    text: str
    merge: Literal["sum", "max", "min"] = "sum"


FAMILIES: dict[str, Family] = {
    # limiters: limiter, algorithm, store
    "headgate.decisions": Family("counter", "{decision}", "Decisions of limiters, by result"),
    "headgate.permits": Family("counter", "{permit}", "Permits that limiters granted or refused"),
    "headgate.waits": Family("counter", "{wait}", "Calls of acquire and pace that have ended"),
    "headgate.wait.time": Family("counter", "s", "Seconds that calls of acquire and pace took"),
    "headgate.waiting": Family("gauge", "{caller}", "Callers that wait in acquire"),
    "headgate.keys": Family("gauge", "{key}", "Keys of limiters in memory"),
    # stores on a server: store, server
    "headgate.store.calls": Family("counter", "{call}", "Calls to a store, by result"),
    "headgate.store.call.time": Family("counter", "s", "Seconds that calls to a store took, the unanswered included"),
    "headgate.store.breaker.open": Family("gauge", "1", "1 while calls are not sent, as the server was silent", "max"),
    "headgate.store.breaker.opened": Family("counter", "{time}", "Times that a server was given up"),
    "headgate.store.connections": Family("gauge", "{connection}", "Connections, and callers that wait for one"),
    # hybrid limiters: limiter, algorithm, store; trips: store
    "headgate.lease.permits": Family("counter", "{permit}", "Permits that callers asked a hybrid limiter for"),
    "headgate.lease.degraded": Family("counter", "{decision}", "Answers that on_store_error gave"),
    "headgate.lease.reports": Family("counter", "{report}", "Reports about one key each, sent to the store"),
    "headgate.lease.burned": Family("counter", "{permit}", "Permits of leases that ran out before they were spent"),
    "headgate.lease.voided": Family("counter", "{lease}", "Leases that the store did not know any more"),
    "headgate.lease.keys": Family("gauge", "{key}", "Keys with a lease or a denial in this process"),
    "headgate.lease.held": Family("gauge", "{permit}", "Permits on lease in this process"),
    "headgate.lease.unreported": Family("gauge", "{permit}", "Permits spent that the store does not know of yet"),
    "headgate.lease.trips": Family("counter", "{trip}", "Round trips that carried reports"),
    "headgate.lease.failed_trips": Family("counter", "{trip}", "Those that failed"),
    "headgate.lease.up": Family("gauge", "1", "0 while leases cannot be reported", "min"),
    # tools: their kind is the label with their name, and store
    "headgate.breaker.calls": Family("counter", "{call}", "Calls through a circuit breaker, by outcome"),
    "headgate.breaker.state": Family("gauge", "1", "1 for the state that this process saw last", "max"),
    "headgate.breaker.changes": Family("counter", "{change}", "Changes of state that a call of this process made"),
    "headgate.lock.acquires": Family("counter", "{call}", "Requests for a lock that have ended, by result"),
    "headgate.lock.wait.time": Family("counter", "s", "Seconds that they took"),
    "headgate.lock.waiting": Family("gauge", "{caller}", "Callers that wait for a lock"),
    "headgate.lock.held": Family("gauge", "{lock}", "Locks that this process holds"),
    "headgate.lock.lost": Family("counter", "{lock}", "Locks that were lost before they were released"),
    "headgate.semaphore.acquires": Family("counter", "{call}", "Requests for room that have ended, by result"),
    "headgate.semaphore.wait.time": Family("counter", "s", "Seconds that they took"),
    "headgate.semaphore.waiting": Family("gauge", "{caller}", "Callers that wait for room"),
    "headgate.semaphore.in_use": Family("gauge", "{slot}", "The weight of the leases that this process holds"),
    "headgate.semaphore.limit": Family("gauge", "{slot}", "The limit that this process has set", "max"),
    "headgate.semaphore.lost": Family("counter", "{lease}", "Leases that were lost before they were released"),
    "headgate.pool.acquires": Family("counter", "{call}", "Requests for a member that have ended, by result"),
    "headgate.pool.wait.time": Family("counter", "s", "Seconds that they took"),
    "headgate.pool.waiting": Family("gauge", "{caller}", "Callers that wait for a member"),
    "headgate.pool.leased": Family("gauge", "{member}", "Members that this process has leased"),
    "headgate.pool.members": Family("gauge", "{member}", "Members by state, as this process saw them last", "max"),
    "headgate.queue.entries": Family("counter", "{entry}", "Entries of a queue, by what this process did to them"),
    "headgate.queue.acquires": Family("counter", "{call}", "Waits for a turn or an entry that have ended, by result"),
    "headgate.queue.wait.time": Family("counter", "s", "Seconds that they took"),
    "headgate.queue.waiting": Family("gauge", "{caller}", "Callers that wait for their turn, or for an entry"),
    "headgate.queue.length": Family("gauge", "{entry}", "Entries that wait, as this process saw it last", "max"),
    # budgets: budget, store
    "headgate.budget.acquires": Family("counter", "{call}", "Reservations that were asked for, by result"),
    "headgate.budget.wait.time": Family("counter", "s", "Seconds that they took"),
    "headgate.budget.waiting": Family("gauge", "{caller}", "Callers that wait for a reservation"),
    "headgate.budget.reserved": Family("counter", "{unit}", "What was reserved, by amount"),
    "headgate.budget.settled": Family("counter", "{unit}", "What was charged in the end, by amount"),
    "headgate.budget.debt": Family("counter", "{unit}", "What was charged beyond the reservation, by amount"),
    "headgate.budget.holds": Family("gauge", "{hold}", "Holds of this process that are not settled"),
}


def prometheus_name(name: str) -> str:
    """The name in Prometheus, with the unit and, for a counter, ``_total`` at the end."""
    family = FAMILIES[name]
    unit = "_seconds" if family.unit == "s" else ""
    return name.replace(".", "_") + unit + ("_total" if family.kind == "counter" else "")
