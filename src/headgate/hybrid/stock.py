"""A region's side and home's side of one key, in Python. `headgate.hybrid.region_script` has the same in Lua.

The quota is divided. Each region has its *floor*, a share of capacity and rate, for ever; home has the rest. A region's
ledger is the ledger of `headgate.hybrid.ledger` with the floor's rate and with a capacity that changes: the floor plus
the *stock*, what home has leased to the region. Home's ledger is that ledger, too, and a region is one node of it.

Never one too many, on either side of a cut, rests on the rules of the ledger and on these:

1. At home: free units and stocks are at most home's capacity. In a region: free units and leases are at most the floor
   and the stock. So all of it together is at most the capacity of the quota, and all that refills at most its rate.
2. A region lowers its stock to what it still has *before* home is told so, and raises it only by a reply of home.
3. Fetches are numbered: the reply to any fetch but the latest is dropped, and home takes its grant back with the next.
4. A region's stock ends before home burns it, and the leases of its processes end before the stock does.
5. A region whose clock steps back drops its stock, as it cannot tell how much of the stock's time has passed.
6. Before the stock grows the floor refills up to now: room that was not there until now fills from now on.
7. Home leases at most half of its capacity and all floors together are at most half of the quota. So home can give a
   region its floor at any moment, whatever it has leased to others. A floor starts empty; home has less from
   then on. Only that of the first region starts full.
"""

from __future__ import annotations

from copy import deepcopy
from math import ceil, floor, gcd, sqrt
from typing import NamedTuple

from headgate.hybrid.ledger import STEP, Ledger
from headgate.hybrid.protocol import OK, VOID, AccuracyProfile, LeaseReply, LeaseRequest, QuotaParams

SHARES = 1000  # a floor is a whole number of these parts of the quota
MOST_SHARES = 500  # that all floors together may have
MOST_UNITS = 1 << 52  # Lua's numbers are exact up to here

STOCK_TTL = 40_000_000  # microseconds that home keeps a stock for a region that is silent
STOCK_ENDS_EARLY = 5_000_000  # in the region, beside a thousandth: its clock may be set back a little, unnoticed
REGION_TTL = 15_000_000  # longest lease of a process in a region
LATEST_DEPOSIT = 10_000_000  # a reply of home that is older is dropped, so that every lease ends before the stock
FETCH_TIMEOUT = 1_000_000  # a fetch without a deposit is lost after this time, or after four usual trips
FIRST_TRIP = 100_000  # taken for the time of a trip to home before the first
SHORTEST = 10_000
LONGEST = 2_000_000  # between two fetches

HOME_PROFILE = AccuracyProfile(MOST_SHARES, 250, 125, LONGEST)


class FetchOrder(NamedTuple):
    """What one process has to ask home for, on behalf of its region."""

    born: int  # of the region's ledger: with the region's name, the node that home knows
    lease_id: int
    seq: int
    acked_seq: int
    held: int
    returned: int
    target: int
    demand: int

    def request(self, region: str) -> LeaseRequest:
        """The report to home."""
        return LeaseRequest(
            "sync", f"{region}.{self.born}", self.lease_id, self.seq, self.acked_seq, self.held, self.returned, 0, 0,
            (), self.target, 0, self.demand, STOCK_TTL,
        )  # fmt: skip


class Deposit(NamedTuple):
    """The reply of home, for the region's ledger."""

    born: int
    seq: int
    status: int
    lease_id: int
    granted: int
    leased_here: int
    report_interval: int
    wait: int


def deposit_of(order: FetchOrder, reply: LeaseReply) -> Deposit:
    return Deposit(
        order.born, order.seq, reply.status, reply.lease_id, reply.granted, reply.leased_here, reply.report_interval,
        reply.wait,
    )  # fmt: skip


def check_regional(params: QuotaParams) -> None:
    """Raise ValueError for a quota that regions cannot share."""
    if params.kind != "bucket":
        raise ValueError("regions serve token_bucket and gcra; a window that starts anew cannot be leased on")
    if params.capacity_units * SHARES > MOST_UNITS:
        raise ValueError("the quota is too fine to be divided between regions: choose a shorter period or burst")


def check_share(params: QuotaParams, share: int) -> None:
    """Raise ValueError if a floor of *share* of SHARES is less than a permit."""
    if params.limit * share < SHARES:
        least = -(-SHARES // params.limit) / SHARES
        raise ValueError(
            f"a floor of {share / SHARES:g} of {params.limit} permits is less than one permit: give floor={least:g} or "
            "more, or a larger limit"
        )


def floor_params(params: QuotaParams, share: int) -> QuotaParams:
    """The quota of a region that has nothing from home, with a floor of *share* of SHARES."""
    common = gcd(params.cost * SHARES, params.rate * share)
    limit, cost, rate = params.limit * share // SHARES, params.cost * SHARES // common, params.rate * share // common
    return params._replace(limit=limit, cost=cost, rate=rate)


def home_params(params: QuotaParams, floors: int = 0) -> QuotaParams:
    """The quota of home beside *floors* of SHARES; without: what home's ledger keeps to notice a changed quota."""
    left = SHARES - floors
    rate = params.rate * left if floors else params.rate
    limit, speed = params.limit * left // SHARES, params.speed * left // SHARES
    return params._replace(limit=limit, cost=params.cost * SHARES, rate=rate, speed=speed)


class Stock:
    """What a region has from home. Times are microseconds of the region's server."""

    __slots__ = (
        "acked_seq",
        "due",
        "ends",
        "fetch_after",
        "interval",
        "lease_id",
        "out",
        "returned",
        "sent_at",
        "seq",
        "trip",
    )  # fmt: skip

    def __init__(self) -> None:
        self.out = 0  # permits that home counts as leased to the region, at least
        self.ends = 0  # the stock ends; 0: there is none but what processes still hold of one that has ended
        self.lease_id = 0
        self.seq = 0
        self.acked_seq = 0
        self.sent_at = 0  # of the fetch under way, 0 for none
        self.returned = 0
        self.trip = FIRST_TRIP  # of a fetch, on average
        self.interval = 0  # between two fetches
        self.due = 0  # the next fetch
        self.fetch_after = 0  # and before it, if the stock runs low, but not until then


class RegionLedger:
    """Everything that a region's Redis keeps about one key."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.stock = Stock()
        self.base: QuotaParams | None = None

    def sync(
        self, time: int, params: QuotaParams, profile: AccuracyProfile, request: LeaseRequest, since: int = 0
    ) -> tuple[LeaseReply, FetchOrder | None]:
        """Answer *request* of a process; the order, if there is one, is for that process. A peek changes nothing.

        *since*: when the region got its floor. All its floors were empty then.
        """
        region = deepcopy(self) if request.op == "peek" else self
        return region._sync(time, params, profile, request, since)

    def _sync(
        self, time: int, params: QuotaParams, profile: AccuracyProfile, request: LeaseRequest, since: int
    ) -> tuple[LeaseReply, FetchOrder | None]:
        ledger, stock = self.ledger, self.stock
        if ledger.params is None:
            ledger._open(time, params)
            ledger.free = min(ledger.free, max(time - since, 0) * params.rate)
        now = self._open(time, params)
        lasts = min(request.ttl, REGION_TTL)
        if stock.out:
            lasts = min(lasts, max(stock.ends - now, 1))
        reply = ledger.sync(time, self._with_stock(params), profile, request._replace(ttl=lasts, inflow=0))
        if stock.ends == 0:  # what processes gave back of an ended stock is gone, too
            self._drop_stock(params)
            effective = self._with_stock(params)
            ledger.free = min(ledger.free, ledger._top(effective, effective.capacity_units))
        if request.op == "peek" or reply.status != OK:
            return reply, None
        order = self._begin_fetch(now, params, request.op == "release")
        return reply._replace(wait=self._wait(now, reply.wait), window_ends_in=lasts), order

    def deposit(self, time: int, params: QuotaParams, deposit: Deposit) -> bool:
        """Take in what home answered; False: it is not the reply to the latest fetch, or came too late."""
        ledger, stock, sent_at = self.ledger, self.stock, self.stock.sent_at
        if ledger.params is None or deposit.born != ledger.born or sent_at == 0 or deposit.seq != stock.seq:
            return False
        if time < ledger.at or time > sent_at + LATEST_DEPOSIT:
            return False
        now = self._open(time, params)
        stock.sent_at = 0
        ledger._open(time, self._with_stock(params))
        free, _ = ledger._load(now)  # the floor refills before the stock grows
        stock.trip += (now - sent_at - stock.trip) // 4
        shortest = max(SHORTEST, stock.trip)
        if deposit.status == OK:
            stock.out = min(stock.out, deposit.leased_here - deposit.granted) + deposit.granted
            free += deposit.granted * params.cost
            stock.lease_id, stock.acked_seq = deposit.lease_id, deposit.seq
            stock.ends = sent_at + STOCK_TTL - STOCK_TTL // 1000 - STOCK_ENDS_EARLY
            interval = min(max(deposit.report_interval, shortest), LONGEST)
            stock.interval = min(interval, 2 * stock.interval) if stock.interval else shortest
            stock.due = now + stock.interval
            stock.fetch_after = stock.due if deposit.wait else now
        else:
            if deposit.status == VOID:  # home has burned the stock, or lost it
                self._drop_stock(params)
                stock.acked_seq = deposit.seq
            stock.due = stock.fetch_after = now + FETCH_TIMEOUT
        effective = ledger.params = self._with_stock(params)
        ledger.free, ledger.at = min(free, ledger._top(effective, effective.capacity_units)), now
        return True

    def _open(self, time: int, params: QuotaParams) -> int:
        """Drop a stock that has ended, or whose end cannot be told; return the time to use."""
        ledger, stock = self.ledger, self.stock
        now = time if ledger.at - time > STEP else max(time, ledger.at)
        if time < ledger.at:
            stock.sent_at = stock.due = stock.fetch_after = 0
        if time < ledger.at or now >= stock.ends:
            self._drop_stock(params)
        if self.base == params:
            ledger.params = self._with_stock(params)  # another stock is not another quota
        self.base = params
        return now

    def _drop_stock(self, params: QuotaParams) -> None:
        """Nothing is left of the stock but what processes hold on lease; it has no end, so their leases end now."""
        stock = self.stock
        stock.ends = stock.lease_id = 0
        stock.out = max(min(stock.out, self.ledger.leased_out - params.limit), 0)

    def _with_stock(self, params: QuotaParams) -> QuotaParams:
        return params._replace(limit=params.limit + self.stock.out)

    def _begin_fetch(self, now: int, params: QuotaParams, leaving: bool) -> FetchOrder | None:
        """The order to ask home, if that is due and no other process is at it."""
        ledger, stock = self.ledger, self.stock
        if stock.sent_at and now < stock.sent_at + max(FETCH_TIMEOUT, 4 * stock.trip):
            return None
        if stock.out and stock.ends == 0:
            return None  # home would take the stock for spent
        has = -(-ledger.free // params.cost) + ledger.leased_out
        demand = max(ledger.demand - floor(params.rate / params.cost * 1e9), 0)  # beside what the floor brings
        likely = demand / 1e9 * (stock.interval + stock.trip * 3 // 2 + SHORTEST)
        # twice what is likely: home has it back with the next report, and each process of the region holds some
        target = max(ceil(2 * likely + 2 * sqrt(likely)) - min(has, params.limit), 0)
        if target == 0 and stock.out == 0:
            return None
        likely = demand / 1e9 * (stock.trip * 13 // 10 + SHORTEST)
        is_low = has <= likely + 2 * sqrt(likely) and now >= stock.fetch_after
        if now < stock.due and not is_low and not (leaving and target == 0):
            return None
        give = max(min(has - params.limit - target, ledger.free // params.cost), 0)
        ledger.free -= give * params.cost
        stock.returned += give
        stock.out = min(stock.out, max(has - give - params.limit, 0))  # before home hears of it
        stock.seq += 1
        stock.sent_at = now
        return FetchOrder(
            ledger.born, stock.lease_id, stock.seq, stock.acked_seq, stock.out, stock.returned, target, demand
        )

    def _wait(self, now: int, wait: int) -> int:
        """*wait*, or the time until home's next reply is expected, if that is sooner."""
        stock = self.stock
        expected = stock.trip + (stock.sent_at or max(stock.due, now)) - now
        return min(wait, expected) if expected > 0 else wait


class HomeLedger:
    """Everything that home keeps about one key; the floors are those of all keys of one limiter."""

    def __init__(self, floors: dict[str, int]) -> None:
        self.ledger = Ledger()
        self.floors = floors
        self.base: QuotaParams | None = None

    def sync(self, time: int, params: QuotaParams, request: LeaseRequest, region: str, share: int) -> LeaseReply | str:
        """Answer *request* of a region. *params* are the whole quota's."""
        if not register(self.floors, region, share):
            return refusal(self.floors)
        base, effective = home_params(params), home_params(params, sum(self.floors.values()))
        if self.base == base:
            self.ledger.params = effective
        self.base = base
        return self.ledger.sync(time, effective, HOME_PROFILE, request)


def register(floors: dict[str, int], region: str, share: int) -> bool:
    """Reserve a floor of *share* for *region*, for ever; False if all floors together would be too much."""
    known = floors.get(region, 0)
    if share > known:
        if sum(floors.values()) - known + share > MOST_SHARES:
            return False
        floors[region] = share
    return True


def refusal(floors: dict[str, int]) -> str:
    """Why home refuses a floor."""
    known = ", ".join(f"{name} {share / SHARES:g}" for name, share in sorted(floors.items()))
    return f"floors together may be at most {MOST_SHARES / SHARES:g} of the quota; home has promised {known or 'none'}"


def in_units_of(reply: LeaseReply, params: QuotaParams, region: QuotaParams) -> LeaseReply:
    """A reply of a region's ledger, whose units are the floor's, in the units of the whole quota."""
    free_before = reply.free_before * params.cost // region.cost
    return reply._replace(free_before=free_before, free=reply.free * params.cost // region.cost)
