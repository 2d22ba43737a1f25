"""Break the protocol in every way that is known to matter, and see the tests go red.

    python -m tests.hybrid.mutants            all of them; exits with 1 if one survives
    python -m tests.hybrid.mutants report     those whose name has that in it

Each is one change to a copy of the source; then the tests that should notice run against the copy. The first run has
no change at all and must be green.
"""

# ruff: noqa: E501  # excerpts of the source as they are
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FLEET, TWINS, LEASE = "test_fleet.py", "test_twins.py", "test_lease.py"
HABITS, TABLE, RETRY, STATS = "test_habits.py", "test_table.py", "test_retry.py", "test_stats.py"
INFLOWS = "test_inflow.py"
SIMULATE, STORES = "test_simulate.py", "test_ledger_stores.py"
REGIONS, REGION_TWINS = "test_regions.py", "test_region_twins.py"
SEVERAL, FAILOVER = "test_several_keys.py", "test_failover_keys.py"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str = FLEET


MUTANTS = [
    Mutant(
        "refill ignores what is leased out",
        "ledger.py",
        "return min(self.free + came, top), params.capacity_units",
        "return min(self.free + came, params.capacity_units), params.capacity_units",
    ),
    Mutant(
        "report applied before refill",
        "ledger.py",
        "        free, ceiling = self._load(now)  # refill before expired leases are burned: until now they took up capacity\n",
        "        early = self.nodes.get(request.node)\n"
        "        if early and early.seq < request.seq and early.lease_id == request.lease_id and request.acked_seq >= early.seq:\n"
        "            self.leased_out -= early.leased_out - min(request.held, early.leased_out)\n"
        "            early.leased_out = min(request.held, early.leased_out)\n"
        "        free, ceiling = self._load(now)\n",
    ),
    Mutant(
        "a burn before the refill",
        "ledger.py",
        "        free, ceiling = self._load(now)  # refill before expired",
        "        if now >= self.exp:\n            self._burn(now)\n        free, ceiling = self._load(now)  # refill before expired",
    ),
    Mutant(
        "an expired lease is refunded",
        "ledger.py",
        "            unclaimed = self._burn(now)\n",
        "            was = self.leased_out\n            unclaimed = self._burn(now)\n            free += (was - self.leased_out) * params.cost\n",
    ),
    Mutant("no sequence check", "ledger.py", "if record and request.seq <= record.seq:", "if record and request.seq < 0:"),
    Mutant("the same number twice", "ledger.py", "if record and request.seq <= record.seq:", "if record and request.seq < record.seq:"),
    Mutant("a late reply is accepted", "lease.py", "        if request.seq != self.in_flight:\n", "        if request.seq < 0:\n"),
    Mutant(
        "a return is not cut to what was leased",
        "ledger.py",
        "returned = max(0, min(request.returned - record.returned, record.leased_out - held))",
        "returned = max(0, request.returned - record.returned)",
        TWINS,
    ),
    Mutant("a lease is known by any id", "ledger.py", "(not record or record.lease_id != request.lease_id)", "(not record)", TWINS),
    Mutant(
        "what is held is believed",
        "ledger.py",
        "held = min(request.held, record.leased_out) if",
        "held = request.held if",
        TWINS,
    ),
    Mutant(
        "a lost grant is not taken back from what is out",
        "ledger.py",
        "            self.leased_out -= record.granted + record.room\n            record.leased_out -= record.granted + record.room\n",
        "            record.leased_out -= record.granted + record.room\n",
    ),
    Mutant(
        "permits that were decided and not received come back",
        "ledger.py",
        "            free += record.granted * params.cost\n",
        "            free = max(free, min(free + (record.granted + 1) * params.cost, params.capacity_units - self.leased_out * params.cost))\n",
    ),
    Mutant(
        "an old lease is kept under a new one",
        "ledger.py",
        "        self.leased_out -= record.leased_out - held\n",
        "        self.leased_out -= record.leased_out - held if request.lease_id else 0\n",
    ),
    Mutant("a lease is cut short", "ledger.py", "max(exp, record.exp) if held else exp", "exp", LEASE),
    Mutant("a lease is not counted as out", "ledger.py", "        self.leased_out += granted\n", "        self.leased_out += 0\n"),
    Mutant("what waits is served for nothing", "ledger.py", "            free -= many * permits * params.cost\n", "            pass\n"),
    Mutant(
        "a lease outlives its time here",
        "lease.py",
        "self.expires = self.sent_at + lasts - lasts // 1000 - MARGIN",
        "self.expires = now + lasts",
    ),
    Mutant("a lease outlives its window", "lease.py", "lasts = 1000 * (min(request.ttl, reply.window_ends_in) if reply.window_ends_in else request.ttl)", "lasts = 1000 * request.ttl"),
    Mutant(
        "what goes back stays here",
        "lease.py",
        "        self.balance -= multiply(give, params.cost)\n",
        "        self.balance -= 0\n",
    ),
    Mutant("a key met again claims to know nothing", "../../../tests/support/hybrid_fleet.py", "Lease(\"k\", process.seq,", "Lease(\"k\", 0,"),
    Mutant("a void lease is spent on", "lease.py", "                self.balance = self.balance_at_last_count = self.unreported = 0\n                self.lease_id = self.expires = self.known_until = 0\n", "                self.lease_id = 0\n", LEASE),
    Mutant("a debt without a floor", "ledger.py", "max(free - debt * params.cost, -params.capacity_units)", "free - debt * params.cost", LEASE),
    Mutant("a lowered quota owes what is leased", "ledger.py", "return top if params.period else max(top, 0)", "return top", LEASE),
    Mutant("permits of a larger quota fill a bucket above its capacity", "ledger.py", "            free = min(free, top)  # leases", "            pass  # leases", LEASE),
    Mutant("leases of a larger quota are not in the way", "ledger.py", "return top if params.period else max(top, 0)", "return top if params.period or top >= 0 else params.capacity_units"),
    Mutant("more is leased than the profile says", "ledger.py", "fair, free_permits, most - self.leased_out, leasable)", "fair, free_permits, leasable)", LEASE),
    Mutant("first come takes all", "ledger.py", "fair = max(1, ceil(free_permits * min(1, SHARE_FACTOR * part)))", "fair = free_permits", LEASE),
    Mutant("a spare for every node", "ledger.py", "if plenty else 0), full, False", "if plenty or 1 else 0), full, False", LEASE),
    Mutant("a clock that steps back makes leases longer", "ledger.py", "                record.exp -= back\n", "                pass\n", LEASE),
    Mutant("a lease does not last until the next report", "lease.py", "RESERVE_TTL if is_reserve else max(TTL, min(3 * self.report_interval, longest))", "RESERVE_TTL if is_reserve else TTL", LEASE),
    Mutant("a counter leases for a few milliseconds", "lease.py", "self._retry_is_promised(now, trip) or now < self.window_ends_by < now + MARGIN + TICK", "self._retry_is_promised(now, trip)", LEASE),
    Mutant("a counter leases what will have run out", "lease.py", "        if max(first, last) > max(now, self.deny_until + self.deny_extra_time):", "        if False:", RETRY),
    Mutant("a counter leases what was promised", "lease.py", "        return last + TICK > now and last + MARGIN + TICK + 2 * trip >= self.window_ends\n", "        return False\n", RETRY),
    Mutant("a counter refuses while it fetches", "table.py", "return lease.balance == 0 and lease.in_flight == 0", "return lease.balance == 0", RETRY),
    Mutant("a report counts as heard when it is sent", "table.py", "table.capacity_units - lease.unreported - lease.balance_at_last_count", "table.capacity_units - lease.balance_at_last_count", RETRY),
    Mutant("the latest promise only", "lease.py", "or until < self.first_promised_retry", "or until > self.first_promised_retry", LEASE),
    Mutant("the first promise only", "lease.py", "promised_retry = first if first >= earliest else last", "promised_retry = first if first >= earliest else 0", RETRY),
    Mutant("a promise that cannot be kept", "lease.py", "                self.due = earliest = self.sent_at + reply.wait * 1000\n", "                self.due = self.sent_at + reply.wait * 1000\n", LEASE),
    Mutant("a long trip makes a wait short", "lease.py", "self.deny_until = max(latest, self.due + trip + 2 * TICK)", "self.deny_until = self.due + trip + 2 * TICK", RETRY),
    Mutant("a long trip makes a wait short where nothing is leased", "lease.py", "self.deny_until = max(latest, min(self.due, retry_at))", "self.deny_until = min(self.due, retry_at)", LEASE),
    Mutant("a promise to many callers", "lease.py", "        held_for_caller = self.balance > 0 and self.last_promised_retry_of_several < earliest and not params.period\n", "        held_for_caller = False\n", SIMULATE),
    Mutant("one permit is enough for several", "lease.py", "held_for_caller = self.balance > 0 and self.last_promised_retry_of_several < earliest and", "held_for_caller = self.balance > 0 and", RETRY),
    Mutant("what runs out keeps a promise", "lease.py", "self.last_promised_retry_of_several < earliest and not params.period\n", "self.last_promised_retry_of_several < earliest\n", RETRY),
    Mutant("what came too late is burned", "lease.py", "if now >= self.expires and (self.balance == 0 or now >= self.known_until):", "if now >= self.expires:", LEASE),
    Mutant("what came too late is refused for", "lease.py", "                self.deny_until, self.due = 0, now\n", "                self.due = now\n", LEASE),
    Mutant("what was burned goes back", "lease.py", "if now >= self.expires and (self.balance == 0 or now >= self.known_until):", "if now >= self.expires and self.balance == 0:", LEASE),
    Mutant("what was served meanwhile is promised again", "lease.py", "            self.expected_free -= multiply(-(-moved_by // 1000), params.rate)", "            self.expected_free -= 0", RETRY),
    Mutant("a window is over when it may not be", "lease.py", "self.window_ends_by = now + window_lasts if", "self.window_ends_by = self.sent_at + window_lasts if", RETRY),
    Mutant("refused beyond the window", "lease.py", "                self.deny_until = min(self.deny_until, self.window_ends_by)\n", "                pass\n", RETRY),
    Mutant("alone, and waits for others", "lease.py", "if reply.wait > 0 and reply.nodes == 1:", "if reply.wait < 0:", RETRY),
    Mutant("alone, and asks for every permit", "lease.py", "max(reply.wait * 1000, ALONE_INTERVAL, shortest)", "max(reply.wait * 1000, shortest)", RETRY),
    Mutant("refused although something went back", "lease.py", "            self.deny_until = 0  # there will be", "            pass  # there will be", LEASE),
    Mutant("several are denied in spite of others", "lease.py", "        if reply.others or params.period:\n", "        if params.period:\n", LEASE),
    Mutant("denials are no demand", "lease.py", "            or self.denied > 0\n", "", LEASE),
    Mutant("leases that only delay", "lease.py", "> profile.leased / 1000 * params.limit:", "> profile.leased * 1e9 * params.limit:", LEASE),
    Mutant("a reset forgives what may be charged", "lease.py", "        self.debt = self.debt_in_doubt\n", "        self.debt = 0\n", LEASE),
    Mutant("idle, and no look", "lease.py", "            self.due = self.idle_check_at = now + self.idle_after\n", "            pass\n", HABITS),
    Mutant("idle after any gap", "lease.py", "max(IDLE_AFTER, min(int(IDLE_GAPS * SECOND / max(self.demand, 0.001)), self.report_interval))", "IDLE_AFTER", HABITS),
    Mutant("asked for when reported", "lease.py", "        if units != self.units_requested_at_last_check or waiting:\n", "        if units > 0 or waiting:\n", HABITS),
    Mutant("a call granted unasked is forgotten", "lease.py", " or now < self.keep_until:", ":", HABITS),
    Mutant("granted unasked while others hold leases", "lease.py", "self.keep_until = now + self._empty_for(reply, params)", "self.keep_until = now + reply.wait * 1000 * (reply.others == 0)", HABITS),
    Mutant("taken from a lease that ran out", "table.py", "if now >= lease.expires or lease.balance < price:", "if lease.balance < price:", TABLE),
    Mutant("put back into a lease that ran out", "table.py", ", 0) if self.read_clock() < lease.expires else 0", ", 0)", TABLE),
    Mutant("a refund of any amount is told", "table.py", "max(-(-min(price - put_back, units_missing) // self.cost), 0)", "(price - put_back) // self.cost", TABLE),
    Mutant("a refund leaves the refusal", "table.py", "            lease.deny_until = 0\n", "", TABLE),
    Mutant("a look at an empty lease", "table.py", "and now < lease.expires and lease.balance > 0:", "and now < lease.expires:", TABLE),
    Mutant("full before it can be asked again", "table.py", "False, used, max(reset, wait), wait, False", "False, used, reset, wait, False", TABLE),
    Mutant("a refund unasks", "table.py", "            self.refunded += put_back\n", "", STATS),
    Mutant("an outage is a wait", "table.py", "            table.policy.requested += price // table.cost\n", "", STATS),
    Mutant("the parent's lock", "limiter_leases.py", "        self.use_lock(lock)\n", "", HABITS),
    Mutant("the parent's queues", "manager.py", "        self.waiters, self.releases, self.schedule = {}, ReleaseQueue(), DueSchedule()\n", "", HABITS),
    Mutant("all keys probe whether Redis is back", "manager.py", "most = 1 if down else BATCH", "most = BATCH", HABITS),
    Mutant("no back-off", "fallback_policy.py", "self.retry_after = min(2 * self.retry_after, LAST_RETRY)", "self.retry_after = FIRST_RETRY", HABITS),
    Mutant("Redis is asked about a blocked key", "limiter_leases.py", "if self.health.outage_error is None and now >= lease.blocked_until:", "if self.health.outage_error is None:", HABITS),
    Mutant("the number of processes is forgotten at once", "manager.py", "self.nodes_seen = max(reply.nodes, self.nodes_seen + (reply.nodes - self.nodes_seen) // 16)", "self.nodes_seen = reply.nodes", HABITS),
    Mutant("the number of processes is never forgotten", "manager.py", "self.nodes_seen = max(reply.nodes, self.nodes_seen + (reply.nodes - self.nodes_seen) // 16)", "self.nodes_seen = max(reply.nodes, self.nodes_seen)", HABITS),
    Mutant("a reset in an outage keeps the debt", "limiter_leases.py", "            lease.forgive_debt()\n", "            pass\n", HABITS),
    Mutant("the debt of a released lease is forgotten", "schedule.py", "has_news = (lease.lease_id and lease.has_news()) or lease.debt or lease.refund", "has_news = lease.lease_id and lease.has_news()", HABITS),
    Mutant("a refund waits for the next report", "limiter_leases.py", "            if not self.refund_locally(key, permits):\n                lease.due = now\n", "            if not self.refund_locally(key, permits):\n", HABITS),
    Mutant("a limiter has a health of its own", "table.py", "        self.health: BackendHealth = manager.health\n", "        self.health: BackendHealth = BackendHealth(manager.health.rng, False)\n", HABITS),
    Mutant("a new key thinks it is alone", "limiter_leases.py", "                lease.nodes = self.manager.nodes_seen\n", "", HABITS),
    Mutant("the latest goes first", "limiter_leases.py", "(lease.debt > 0, lease.last_call_at)", "(lease.debt > 0, -lease.last_call_at)", HABITS),
    Mutant("debts go first", "limiter_leases.py", "(lease.debt > 0, lease.last_call_at)", "lease.last_call_at", HABITS),
]  # fmt: skip

INFLOW = [
    ("a lease that ended is spent", "lease.py", "or self.in_flight or self.balance < price or now >= self.expires:", "or self.in_flight or self.balance < price:"),
    ("a full lease goes on to fill", "inflow.py", "        if came >= self.headroom:\n            came = self.headroom\n", "        if came >= self.room - balance:\n            came = self.room - balance\n"),
    ("the time of being full comes in later", "inflow.py", "            self.added_at = now  # the rest is lost: the lease is full\n", "            self.added_at += int(came / self.rate) + 1\n"),
    ("it goes on while a report is under way", "lease.py", "        if inflow is not None and self.in_flight == 0:\n", "        if inflow is not None:\n"),
    ("a trip brings the larger part", "lease.py", "came = int(min(stopped.rate, inflow.rate) * (now - self.sent_at))", "came = int(max(stopped.rate, inflow.rate) * (now - self.sent_at))"),
    ("it goes on after a lost reply", "lease.py", "        self.inflow = None  # Redis may have changed it\n", ""),
    ("it begins when the report was sent", "lease.py", "inflow = inflow_of(reply, params, self.balance, now)", "inflow = inflow_of(reply, params, self.balance, self.sent_at)"),
    ("a part of a permit is not reported", "lease.py", "held = -(-self.balance // params.cost)", "held = self.balance // params.cost"),
    ("the ledger refills as if there were none", "ledger.py", "                came -= withheld(came, self.inflow)\n", "                pass\n"),
    ("room is not counted as leased", "ledger.py", "        self.leased_out += room\n", "        self.leased_out += 0\n"),
    ("room is made where the bucket is free", "ledger.py", "- has, most - self.leased_out, unused)), 0)", "- has, most - self.leased_out)), 0)"),
    ("more than the rate comes in", "ledger.py", "inflow = min(wanted, PARTS - self.inflow)", "inflow = wanted"),
    ("the room of a lost reply is taken for free", "ledger.py", "            free += record.granted * params.cost\n", "            free += (record.granted + record.room) * params.cost\n"),
    ("an ended lease had no inflow", "ledger.py", "came = (now - max(record.exp, self.at)) * self.params.rate", "came = (now - self.at) * self.params.rate"),
]  # fmt: skip

MUTANTS += [Mutant(f"inflow: {name}", file, old, new) for name, file, old, new in INFLOW]
MUTANTS += [Mutant("inflow: a trip fills a full lease", "lease.py", "came = max(min(came, stopped.headroom, multiply(reply.room, params.cost)), 0)", "came = max(min(came, multiply(reply.room, params.cost)), 0)", INFLOWS)]  # fmt: skip
MUTANTS += [Mutant("inflow: a clock that runs fast brings more", "inflow.py", "SLOWER: Final = 0.999", "SLOWER: Final = 1.0", INFLOWS)]  # fmt: skip
MUTANTS += [Mutant("inflow: a refund is put into a full lease", "table.py", "                spent = min(spent, lease.inflow.room - lease.inflow.headroom - lease.balance)\n", "                pass\n", INFLOWS)]  # fmt: skip

LUA = [
    ("the ledger refills as if there were no inflow", "came = came - withheld(came, s.inflow) end", "came = came end"),
    ("an ended lease had no inflow", "(now - max(record.exp, s.at)) * params.rate", "(now - s.at) * params.rate"),
    ("room is not counted as leased", "  s.leased_out = s.leased_out + room\n", ""),
    ("a long lease outlives its key", "  if s.late > 0 then set('late', s.late) end\n", ""),
    ("refill ignores what is leased out", "return min(s.free + came, top), params.capacity_units", "return min(s.free + came, params.capacity_units), params.capacity_units"),
    ("an expired lease is refunded", "  free = free - overhang(s, params)\n", "  if s.exp == FOREVER and s.nodes == 0 then free = free + params.cost end\n"),
    ("a burn before the refill", "  local free, ceiling = load(s, params, now)\n  local loaded", "  if now >= s.exp then burn(s, params, now, node) end\n  local free, ceiling = load(s, params, now)\n  local loaded"),
    ("a lease is cut short", "held > 0 and max(exp, record.exp) or exp", "exp"),
    ("no sequence check", "if record and request.seq <= record.seq then", "if record and request.seq < 0 then"),
    ("a return is not cut", "max(0, min(request.returned - record.returned, record.leased_out - held))", "max(0, request.returned - record.returned)"),
    ("a lost grant is not taken back", "    s.leased_out = s.leased_out - record.granted - record.room\n", ""),
    ("the key expires before its leases", "3600000000, 91000000", "3600000000, 1000"),
    ("all records in one call", "for i = 1, size, 1000 do redis.call('HSET', s.key, unpack(pairs_, i, min(i + 999, size))) end", "redis.call('HSET', s.key, unpack(pairs_))"),
    ("a lowered quota owes what is leased", "return params.windowed and top or max(top, 0)", "return top"),
    ("digits are lost", "string.format('%.0f:%.0f:%.0f", "string.format('%.14g:%.14g:%.14g"),
]  # fmt: skip

MUTANTS += [Mutant(f"Lua: {name}", "script.py", old, new, TWINS) for name, old, new in LUA]

SQL = [
    ("the ledger refills as if there were no inflow", "least(s.free + came - {withheld_all}, top)", "least(s.free + came, top)"),
    ("an ended lease had no inflow", "(now_us - greatest(l.exp - back, s.at)) * rate", "(now_us - s.at) * rate"),
    ("room is not counted as leased", "      s.leased_out := s.leased_out + room;\n", ""),
    ("a long lease outlives its ledger", "THEN s.late := greatest(s.late, rec.exp); END IF;", "THEN s.late := s.late; END IF;"),
    ("refill ignores what is leased out", "      top := greatest(capacity - s.leased_out * cost, 0);\n      IF s.inflow", "      top := capacity;\n      IF s.inflow"),
    ("an expired lease is refunded", "      s.nodes := s.nodes - z;\n", "      s.nodes := s.nodes - z;\n      free := free + x * cost;\n"),
    ("a lease is cut short", "CASE WHEN held > 0 THEN greatest(expires, rec.exp) ELSE expires END", "expires"),
    ("no sequence check", "IF has_record AND asked_seq <= rec.seq THEN", "IF has_record AND asked_seq < 0 THEN"),
    ("a return is not cut", "greatest(0, least(asked_returned - rec.returned, rec.leased_out - held))", "greatest(0, asked_returned - rec.returned)"),
    ("a lost grant is not taken back", "        s.leased_out := s.leased_out - rec.granted - rec.room;\n", ""),
    ("leases of a ledger that was gone stay", "      DELETE FROM {p}_lease l WHERE l.key = row_key;  -- of a ledger that was gone\n", "      PERFORM 1;\n"),
    ("a peek burns", "    IF op = {peek} THEN\n", "    IF burned THEN DELETE FROM {p}_lease l WHERE l.key = row_key; END IF;\n    IF op = {peek} THEN\n"),
    ("rows are not swept", "IF pages > 0 THEN PERFORM", "IF pages < 0 THEN PERFORM"),
]  # fmt: skip

MUTANTS += [Mutant(f"SQL: {name}", "ledger_sql.py", old, new, STORES) for name, old, new in SQL]

SHARED = [
    ("a gone ledger counts", "        if int(gone) <= now:\n", "        if int(gone) <= 0:\n"),
    ("a peek is written", '            if request.op != "peek":\n', "            if request:\n"),
    ("the lock stays", "            fcntl.flock(fd, fcntl.LOCK_UN)  # a child", "            return  # a child"),
]  # fmt: skip

MUTANTS += [Mutant(f"shared: {name}", "shared_leases.py", old, new, STORES) for name, old, new in SHARED]

MAJORITY = [
    ("callers are served by a vote", "keys", "admitted = min(served.values())", "admitted = sorted(served.values())[-self.needed]"),
    ("leases are granted by a vote", "keys", "granted = max(min(self.stores[place].covered for place in good) - request.held, 0)", "granted = max(sorted(self.stores[place].covered for place in good)[-self.needed] - request.held, 0)"),
    ("one store is enough", "keys", "        if len(good) < self.needed:\n", "        if not good:\n"),
    ("what a store has missed is not charged", "lease", "max(min(owed - paid, total - aged), 0) + self.extra", "self.extra"),
    ("fresh spends are taken for old ones", "lease", "min(owed - paid, total - aged)", "owed - paid - aged"),
    ("debt in doubt is forgotten", "lease", "max(min(owed - self.in_doubt, spare), 0)", "max(min(owed, spare), 0)"),
    ("what was spent long ago is charged", "keys", "max((spent for at, spent in self.history if now - at >= fill_time(params)), default=0)", "0"),
    ("nothing is given back", "lease", "        self.returned += spare - paid\n", ""),
    ("what callers were served beyond is kept", "lease", "        self.refund += permits\n", ""),
    ("a bucket that was full gets a refund", "lease", "if self.refund > 0 and now + LATE - self.refund_since >= self.refund_room * 1000:", "if self.refund < 0:"),
    ("scarce permits are asked for at all stores", "keys", "        first = self._first(now, request, params)\n", "        first = None\n"),
    ("no peek before a store lends", "keys", "if not store.missed and not (store.lost", "if not (store.lost"),
    ("a store that forgot is not made level", "levels", "store.extra = max(-(-units // (params.cost * max(nodes, 1))), 0)", "store.extra = 0"),
    ("a store that lost a lease stays empty", "keys", "store.lost |= now < store.until", "store.lost = False"),
    ("a level that is set twice counts for nothing", "levels", "acked_seq=request.seq - 1, held=0", "acked_seq=store.acked_seq, held=0"),
    ("a lease that a process holds is forgotten", "keys", "                if now >= store.until:\n                    store.forget()\n", "                store.forget()\n"),
    ("a lease that ran out still covers", "keys", "                if now >= store.until:\n                    store.forget()\n", ""),
    ("a lease that ran out has paid", "keys", "if now >= store.until and not store.missed:", "if now >= store.until:"),
]  # fmt: skip

MUTANTS += [Mutant(f"several: {name}", f"several_{part}.py", old, new, SEVERAL) for name, part, old, new in MAJORITY]

FIRST = [
    ("no hand-over", "request.debt + max(-((right - left) // params.cost), 0)", "request.debt + (max(-((right - left) // params.cost), 0) if self.place < self.at else 0)"),
    ("no charge when it comes back", "request.debt + max(-((right - left) // params.cost), 0)", "request.debt + (max(-((right - left) // params.cost), 0) if self.place > self.at else 0)"),
    ("a store that forgot is trusted", "self.moves = self.place != self.at or reply.nodes == 0", "self.moves = self.place != self.at"),
    ("both leases are spent", "granted=max(reply.leased_here - request.held, 0)", "granted=reply.leased_here"),
    ("what is exchanged goes back twice", "store.give_back(min(held, reply.leased_here)", "store.give_back(held + reply.leased_here"),
    ("what is exchanged is counted twice", "            store.give_back(min(held, reply.leased_here), reply, self.sent_at, params)\n", ""),
    ("what is held is handed on", "right = min(self._free_now(self.sent_at, params) + given * params.cost", "right = min(self._free_now(self.sent_at, params) + (given + request.held) * params.cost"),
    ("a peek is a reply", "        del replies[self.place]  # the next one counts\n", ""),
    ("a move that failed is a move", "self.place, self.moves = place, False", "self.place = place"),
    ("what is held outlives its window", "        held = request.held if self.sent_at < self.until else 0\n", "        held = request.held\n"),
    ("what is kept is cut", "return reply._replace(leased_here=reply.leased_here + self.kept)", "return reply"),
]  # fmt: skip

MUTANTS += [Mutant(f"first: {name}", "failover_keys.py", old, new, FAILOVER) for name, old, new in FIRST]


REGION = [
    ("home is told of less than the region keeps", "stock.acked_seq, stock.out, stock.returned", "stock.acked_seq, max(stock.out - 1, 0), stock.returned"),
    ("the reply to an old fetch is taken", " or sent_at == 0 or deposit.seq != stock.seq:", " or sent_at == 0:"),
    ("a reply is taken twice", "        stock.sent_at = 0\n        ledger._open", "        ledger._open"),
    ("a stock outlives home's", "sent_at + STOCK_TTL - STOCK_TTL // 1000 - STOCK_ENDS_EARLY", "sent_at + STOCK_TTL"),
    ("a stock lasts from its arrival", "sent_at + STOCK_TTL - STOCK_TTL // 1000 - STOCK_ENDS_EARLY", "now + STOCK_TTL"),
    ("a lease outlives the stock", "            lasts = min(lasts, max(stock.ends - now, 1))\n", "            pass\n"),
    ("a stock is kept when the clock steps back", "if time < ledger.at or now >= stock.ends:", "if now >= stock.ends:"),
    ("a fetch goes on when the clock steps back", "stock.sent_at = stock.due = stock.fetch_after = 0", "stock.due = stock.fetch_after = 0"),
    ("a stock never ends", "if time < ledger.at or now >= stock.ends:", "if time < ledger.at or stock.ends == 0:"),
    ("leases of an ended stock are forgotten", "stock.out = max(min(stock.out, self.ledger.leased_out - params.limit), 0)", "stock.out = 0"),
    ("what comes back of an ended stock stays", "            ledger.free = min(ledger.free, ledger._top(effective, effective.capacity_units))\n        if request", "        if request"),
    ("a stock that ended is reported as spent", "        if stock.out and stock.ends == 0:\n            return None", "        if stock.out < 0:\n            return None"),
    ("the floor of a new region starts full", "ledger.free = min(ledger.free, max(time - since, 0) * params.rate)", "ledger.free = params.capacity_units"),
    ("home has the floors too", "home_params(params, sum(self.floors.values()))", "home_params(params, max(self.floors.values()))"),
    ("home leases all it has", "HOME_PROFILE = AccuracyProfile(MOST_SHARES,", "HOME_PROFILE = AccuracyProfile(SHARES,"),
    ("what goes back to home stays", "        ledger.free -= give * params.cost\n", ""),
    ("more goes back than is taken away", "        stock.returned += give\n", "        stock.returned += give + 1\n"),
    ("a part of a permit is not reported", "has = -(-ledger.free // params.cost)", "has = ledger.free // params.cost"),
    ("the region keeps its stock and home takes it back", "stock.out = min(stock.out, max(has - give - params.limit, 0))", "stock.out = min(stock.out, max(has - give - params.limit, 0) // 2)"),
]  # fmt: skip

MUTANTS += [Mutant(f"region: {name}", "stock.py", old, new, REGIONS) for name, old, new in REGION]
MUTANTS += [Mutant("region: refill counts twice when the stock grows", "stock.py", "        ledger.free, ledger.at = min(free, ledger._top(effective, effective.capacity_units)), now\n", "        ledger.free = min(free, ledger._top(effective, effective.capacity_units))\n", REGION_TWINS)]  # fmt: skip

REGION_LUA = [
    ("the reply to an old fetch is taken", "sent_at == 0 or d.seq ~= k.seq then", "sent_at == 0 then"),
    ("a reply is taken however late", " or time > sent_at + LATEST_DEPOSIT then", " then"),
    ("refill counts twice when the stock grows", "'free', free, 'at', now, 'law'", "'free', free, 'law'"),
    ("a stock outlives home's", "sent_at + STOCK_TTL - STOCK_TTL / 1000 - STOCK_ENDS_EARLY", "sent_at + STOCK_TTL"),
    ("a lease outlives the stock", "  if k.out > 0 then lasts = min(lasts, max(k.ends - now, 1)) end\n", ""),
    ("a stock is kept when the clock steps back", "if time < k.at or now >= k.ends then", "if now >= k.ends then"),
    ("what goes back to home stays", "  k.free = k.free - give * params.cost\n", ""),
    ("what home does not count is spent", "min(k.out, d.leased_here - d.granted) + d.granted", "k.out + d.granted"),
    ("a stock that home lost is spent", "      drop_stock(k, params)\n      k.acked_seq = d.seq", "      k.acked_seq = d.seq"),
    ("the floor of a new region starts full", "effective.initial = min(params.capacity_units, max(time - since, 0) * params.rate)", "effective.initial = params.capacity_units"),
    ("home has the floors too", "rate = base.rate * left, period", "rate = base.rate * SHARES, period"),
    ("floors of more than half", "if sum - known + share > MOST_SHARES then", "if share > MOST_SHARES then"),
]  # fmt: skip

MUTANTS += [Mutant(f"region Lua: {name}", "region_script.py", old, new, REGION_TWINS) for name, old, new in REGION_LUA]


def mutated(mutant: Mutant, place: Path) -> tuple[Path, str]:
    """The file below *place* that *mutant* changes, and what it says then."""
    path = Path(place, "src/headgate/hybrid", mutant.file).resolve()
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: its place is found {text.count(mutant.old)} times"
    return path, text.replace(mutant.old, mutant.new)


def survives(mutant: Mutant | None) -> bool:
    """Whether the tests stay green with *mutant* in the source."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(
            ROOT / "src", Path(place, "src"), ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        )
        shutil.copytree(ROOT / "tests", Path(place, "tests"), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "docs", Path(place, "docs"))
        if mutant:
            path, text = mutated(mutant, Path(place))
            path.write_text(text)
        tests = sorted({one.tests for one in MUTANTS}) if mutant is None else [mutant.tests]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            str(ROOT / "pyproject.toml"),
        ]
        command += ["--rootdir", place, *(f"{place}/tests/hybrid/{name}" for name in tests)]
        environment = os.environ | {"PYTHONPATH": f"{place}/src:{place}", "HEADGATE_MACHINE_SHRINK": "0"}
        environment.pop("HEADGATE_EXPECT_COMPILED", None)
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode not in (0, 1) or (mutant is None and done.returncode):
            raise RuntimeError(done.stdout + done.stderr)
        return done.returncode == 0


def chosen(words: list[str]) -> Iterator[Mutant]:
    return (mutant for mutant in MUTANTS if all(word in mutant.name for word in words))


def main() -> None:
    for mutant in MUTANTS:
        mutated(mutant, ROOT)
    survives(None)
    alive = 0
    for mutant in chosen(sys.argv[1:]):
        lives = survives(mutant)
        alive += lives
        print(f"{'SURVIVES' if lives else 'killed  '}  {mutant.name}", flush=True)
    print(f"{alive} survive")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
