"""`headgate.hybrid.ledger` in PL/pgSQL, with the same names in the same order; how it is called.

{prefix}_ledger  a row for each key: the fields of a `Ledger` (`win` is its window), the parameters of its quota as text
                 (`law`), and from when on the row says nothing (`gone`)
{prefix}_lease   a row for each node of a key: the fields of a `NodeRecord`
{prefix}_sync    answer any number of requests, each about one key, in one step

The function locks the rows of all keys, in the order of the keys, and reads the clock then. It is one statement and one
transaction, so a client that is killed or stands still can neither leave half of a change nor hold a lock.
`headgate.postgresql.schema` makes all this beside the tables of `Limiter`.
"""

from __future__ import annotations

from headgate.hybrid import protocol
from headgate.hybrid.ledger import FOREVER, LONGEST_INTERVAL, LONGEST_LEASE, STEP
from headgate.postgresql.schema import parameters

OPERATIONS = {"sync": 1, "release": 2, "reset": 3, "peek": 4}
FIELDS = 16  # of a reply
NUMBERS = 21  # of a call: six of its quota, three of its accuracy, twelve of its request
_SHARED_NAMES = (  # of `headgate.hybrid.protocol`
    *("OK", "STALE", "VOID", "FULL_ABOVE", "OVERSUBSCRIBED_ABOVE", "DRAINING_ABOVE", "DRAINING_FACTOR"),
    *("MIN_REPORT_PART", "SHARE_FACTOR", "PARTS", "DEMAND_PART", "LEAST_ROOM", "SHORT_OF_INFLOW"),
)
MOST = 1 << 61  # no count of permits is as large, and its units still fit into a bigint

TABLES = """
CREATE UNLOGGED TABLE {p}_ledger (
  key text COLLATE "C" PRIMARY KEY, law text NOT NULL, at bigint NOT NULL, free bigint NOT NULL, win bigint NOT NULL,
  current bigint NOT NULL, previous bigint NOT NULL, leased_out bigint NOT NULL, demand bigint NOT NULL,
  exp bigint NOT NULL, nodes bigint NOT NULL, born bigint NOT NULL, lost bigint NOT NULL, gone bigint NOT NULL,
  inflow bigint NOT NULL, late bigint NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE UNLOGGED TABLE {p}_lease (
  key text COLLATE "C" NOT NULL, node text COLLATE "C" NOT NULL, lease_id bigint NOT NULL, seq bigint NOT NULL,
  leased_out bigint NOT NULL, exp bigint NOT NULL, demand bigint NOT NULL, returned bigint NOT NULL,
  granted bigint NOT NULL, debt bigint NOT NULL, room bigint NOT NULL, inflow bigint NOT NULL,
  PRIMARY KEY (key, node)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
"""

# Keys are sorted, each once; `made` says which of them a call may have to make. The other arrays have an element, or
# NUMBERS of them, for each call; `sizes` says how many pairs of `waiting` a call has.
FUNCTION = """
CREATE OR REPLACE FUNCTION {p}_sync(
  at bigint, keys text[], made integer[], places integer[], ops integer[], names text[], laws text[],
  numbers bigint[], sizes integer[], waiting bigint[], pages integer
) RETURNS bigint[] LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_variable
DECLARE
  s {p}_ledger%ROWTYPE; rec {p}_lease%ROWTYPE; row_key text; op integer; n integer; answer bigint[] := '{{}}';
  first integer; last integer := 0; time_us bigint; now_us bigint; back bigint; status integer;
  known boolean; has_record boolean; burned boolean; x bigint; y bigint; z bigint;
  most_permits bigint; cost bigint; rate bigint; period bigint; step bigint; speed bigint; capacity bigint;
  profile_leased bigint; profile_report bigint; profile_full bigint;
  asked_lease_id bigint; asked_seq bigint; asked_acked bigint; asked_held bigint; asked_returned bigint;
  asked_refund bigint; asked_debt bigint; asked_target bigint; asked_reserve bigint; asked_demand bigint;
  asked_ttl bigint; asked_inflow bigint;
  free bigint; ceiling bigint; loaded bigint; top bigint; window_ends_in bigint; own bigint; held bigint;
  returned bigint; debt bigint; free_before bigint; refused bigint; price bigint; many bigint; node_count bigint;
  oversubscribed boolean; is_full boolean; rationed boolean; free_permits bigint; leasable bigint; granted bigint;
  part float8; most float8; cap float8; fair float8; others bigint; report_interval bigint; wait_us bigint;
  elapsed bigint; used bigint; left_permits bigint; expires bigint; full_in bigint;
  came bigint; unclaimed bigint; room bigint; inflow bigint; wanted float8; short boolean;
BEGIN
  FOR i IN 1..cardinality(keys) LOOP
    LOOP
      PERFORM 1 FROM {p}_ledger l WHERE l.key = keys[i] FOR UPDATE;
      EXIT WHEN FOUND OR made[i] = 0;
      INSERT INTO {p}_ledger VALUES (keys[i], '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING;
      EXIT WHEN FOUND;
    END LOOP;
  END LOOP;
  time_us := {clock};
  FOR i IN 1..cardinality(places) LOOP
    row_key := keys[places[i]];
    op := ops[i];
    first := last + 1;
    last := last + sizes[i];
    n := (i - 1) * {NUMBERS};
    most_permits := numbers[n + 1]; cost := numbers[n + 2]; rate := numbers[n + 3]; period := numbers[n + 4];
    step := numbers[n + 5]; speed := numbers[n + 6];
    profile_leased := numbers[n + 7]; profile_report := numbers[n + 8]; profile_full := numbers[n + 9];
    asked_lease_id := numbers[n + 10]; asked_seq := numbers[n + 11]; asked_acked := numbers[n + 12];
    asked_held := numbers[n + 13]; asked_returned := numbers[n + 14]; asked_refund := numbers[n + 15];
    asked_debt := numbers[n + 16]; asked_target := numbers[n + 17]; asked_reserve := numbers[n + 18];
    asked_demand := numbers[n + 19]; asked_ttl := numbers[n + 20]; asked_inflow := numbers[n + 21];
    capacity := most_permits * cost;

    -- open
    SELECT l.* INTO s FROM {p}_ledger l WHERE l.key = row_key;
    known := FOUND AND s.law <> '' AND s.gone > time_us;
    back := 0;
    IF NOT known THEN
      x := CASE WHEN period > 0 THEN time_us / period ELSE 0 END;
      s := ROW(row_key, laws[i], time_us, capacity, x, 0, 0, 0, 0, {FOREVER}, 0, time_us, 0, 0, 0, 0);
    ELSIF s.law <> laws[i] THEN
      x := split_part(s.law, ':', 3)::bigint;
      x := {floor_free};
      s.free := greatest(least(x, most_permits), -most_permits) * cost;
      s.win := CASE WHEN period > 0 THEN s.at / period ELSE 0 END;
      s.law := laws[i];
    END IF;
    IF s.at - time_us > {STEP} THEN
      back := s.at - time_us;
      s.at := time_us;
      s.win := CASE WHEN period > 0 THEN least(s.win, time_us / period) ELSE 0 END;
      s.exp := s.exp - back;
      s.late := greatest(s.late - back, 0);
    END IF;
    now_us := greatest(time_us, s.at);

    -- load
    ceiling := capacity;
    IF period = 0 THEN
      top := greatest(capacity - s.leased_out * cost, 0);
      IF s.inflow > 0 THEN
        came := (now_us - s.at) * rate;
        free := least(s.free + came - {withheld_all}, top);
      ELSIF now_us - s.at > (top - s.free) / rate THEN
        free := top;
      ELSE
        free := least(s.free + (now_us - s.at) * rate, top);
      END IF;
    ELSE
      x := now_us / period;
      IF x > s.win THEN
        s.previous := CASE WHEN x = s.win + 1 THEN s.current ELSE 0 END;
        s.win := x;
        s.current := 0;
      END IF;
      IF step > 0 THEN ceiling := ceiling - s.previous * (cost - now_us % period / step); END IF;
      free := ceiling - s.current * cost;
    END IF;
    loaded := free;

    -- burn; the rows are removed when all is saved
    burned := now_us >= s.exp;
    IF burned THEN
      top := ceiling - s.leased_out * cost;
      SELECT coalesce(sum(l.leased_out), 0), coalesce(sum(l.demand), 0), count(*) INTO x, y, z
      FROM {p}_lease l WHERE l.key = row_key AND l.exp - back <= now_us;
      IF s.inflow > 0 THEN
        FOR inflow, came IN SELECT l.inflow, (now_us - greatest(l.exp - back, s.at)) * rate
          FROM {p}_lease l WHERE l.key = row_key AND l.exp - back <= now_us AND l.inflow > 0 LOOP
          s.inflow := s.inflow - inflow;
          inflow := {PARTS} - inflow;
          free := free + came - {withheld};
        END LOOP;
        free := least(free, greatest(top, 0));
      END IF;
      s.leased_out := s.leased_out - x;
      s.demand := s.demand - y;
      s.nodes := s.nodes - z;
      SELECT coalesce(min(l.exp - back), {FOREVER}) INTO x
      FROM {p}_lease l WHERE l.key = row_key AND l.exp - back > now_us;
      s.exp := x;
    END IF;

    -- overhang
    IF period > 0 THEN free := free - greatest(s.leased_out - s.current, 0) * cost; END IF;
    window_ends_in := CASE WHEN period > 0 THEN period - now_us % period ELSE 0 END;
    has_record := false;
    IF known THEN
      SELECT l.* INTO rec FROM {p}_lease l WHERE l.key = row_key AND l.node = names[i];
      IF FOUND THEN
        rec.exp := rec.exp - back;
        has_record := NOT burned OR rec.exp > now_us;
      END IF;
    END IF;
    IF op = {peek} THEN
      own := CASE WHEN has_record THEN rec.leased_out ELSE 0 END;
      answer := answer || ARRAY[{OK}, 0, 0, own, free, free, s.leased_out - own, s.nodes, 0, 0, window_ends_in, 0,
        s.current, s.previous, 0, 0];
      CONTINUE;
    END IF;

    status := {OK};
    IF has_record AND asked_seq <= rec.seq THEN
      status := {STALE};
    ELSIF asked_lease_id > 0 AND (NOT has_record OR rec.lease_id <> asked_lease_id) THEN
      status := {VOID};
      IF asked_lease_id < s.born AND s.lost = 0 THEN
        s.lost := 1;
        free := least(free, 0);
      END IF;
    ELSE
      IF NOT has_record THEN
        rec := ROW(row_key, names[i], now_us, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        s.nodes := s.nodes + 1;
      END IF;
      IF asked_acked < rec.seq THEN
        free := free + rec.granted * cost;
        s.leased_out := s.leased_out - rec.granted - rec.room;
        rec.leased_out := rec.leased_out - rec.granted - rec.room;
      ELSE
        rec.debt := 0;
      END IF;
      s.inflow := s.inflow - rec.inflow;
      IF asked_lease_id = 0 THEN
        rec.lease_id := now_us;
        rec.returned := asked_returned;
      END IF;
      held := CASE WHEN asked_lease_id > 0 AND op <> {release} THEN least(asked_held, rec.leased_out) ELSE 0 END;
      returned := greatest(0, least(asked_returned - rec.returned, rec.leased_out - held));
      s.leased_out := s.leased_out - (rec.leased_out - held);
      free := free + returned * cost;

      IF op = {reset} THEN
        s.previous := 0;
        IF period > 0 THEN loaded := capacity - s.current * cost; END IF;
        ceiling := capacity;
        free := capacity - s.leased_out * cost;
        IF period = 0 THEN free := greatest(free, 0); END IF;
      END IF;
      top := ceiling - s.leased_out * cost;
      IF period = 0 THEN
        top := greatest(top, 0);
        free := least(free, top);
      END IF;
      free := greatest(free, least(free + least(asked_refund, {MOST} / cost) * cost, top));
      debt := greatest(asked_debt - rec.debt, 0);
      IF debt > 0 THEN
        free := least(free, greatest(free - least(debt, {MOST} / cost) * cost, -capacity));
      END IF;
      free_before := free;
      refused := 0;
      FOR j IN first..last LOOP
        price := waiting[2 * j] * cost;
        many := CASE WHEN free > 0 THEN least(waiting[2 * j - 1], free / price) ELSE 0 END;
        free := free - many * price;
        IF many < waiting[2 * j - 1] THEN refused := greatest(refused, waiting[2 * j]); END IF;
      END LOOP;

      s.demand := s.demand + asked_demand - rec.demand;
      node_count := s.nodes;
      oversubscribed := s.demand * 1000 > speed * {OVERSUBSCRIBED_ABOVE};

      -- grant
      is_full := (free + s.leased_out * cost)::float8 / capacity > {FULL_ABOVE}::float8;
      free_permits := greatest(free / cost, 0);
      leasable := CASE WHEN step > 0 AND refused > 0 THEN 0 ELSE most_permits - refused - s.leased_out END;
      granted := 0;
      rationed := false;
      IF op <> {sync} OR asked_target <= held OR leasable < 1 THEN
        granted := 0;
      ELSIF asked_reserve > 0 THEN
        IF is_full AND node_count * 1000 <= profile_full * most_permits THEN
          granted := least(asked_target - held, free_permits, leasable);
        END IF;
      ELSE
        part := CASE WHEN s.demand > 0 THEN asked_demand::float8 / s.demand ELSE 1::float8 / node_count END;
        most := (profile_leased * most_permits)::float8 / 1000;
        cap := most * greatest(part, 1::float8 / node_count) - held;
        fair := greatest(1, ceil(free_permits * least(1, {SHARE_FACTOR} * part)));
        granted := greatest(floor(least(
          (asked_target - held)::float8, cap, fair, free_permits::float8, most - s.leased_out, leasable::float8)), 0);
        rationed := fair <= granted AND granted < asked_target - held;
      END IF;
      free := free - granted * cost;
      s.leased_out := s.leased_out + granted;

      -- share
      room := 0;
      inflow := 0;
      short := false;
      IF asked_inflow > 0 AND op = {sync} AND period = 0 AND asked_target > 0 AND asked_reserve = 0
        AND node_count > 1 AND refused <= 1 THEN
        part := CASE WHEN s.demand > 0 THEN asked_demand::float8 / s.demand ELSE 1::float8 / node_count END;
        most := (profile_leased * most_permits)::float8 / 1000;
        cap := most * greatest(part, 1::float8 / node_count);
        x := capacity - free;
        room := greatest(floor(least(least(asked_target::float8, cap) - held - granted, most - s.leased_out,
          ({floor_used} - s.leased_out)::float8)), 0);
        wanted := floor({PARTS} * (asked_demand::float8
          / greatest(s.demand::float8, (speed * ({DEMAND_PART} - 1))::float8 / {DEMAND_PART})));
        inflow := least(wanted, ({PARTS} - s.inflow)::float8);
        short := inflow < wanted * {SHORT_OF_INFLOW}::float8;
        IF inflow < 1 OR held + granted + room < {LEAST_ROOM} THEN
          room := 0;
          inflow := 0;
        END IF;
      END IF;
      s.leased_out := s.leased_out + room;
      others := s.leased_out - held - granted - room;

      -- report_interval
      part := CASE WHEN is_full THEN profile_full ELSE profile_report END;
      IF is_full AND s.demand * 1000 > speed * {DRAINING_ABOVE} THEN part := part / {DRAINING_FACTOR}; END IF;
      IF oversubscribed AND period = 0 THEN
        x := capacity - free - s.leased_out * cost;
        part := least(part, greatest(x::float8 / capacity * 500, {MIN_REPORT_PART}));
      END IF;
      report_interval := floor(least(
        part * most_permits * 1000000 / greatest(least(s.demand, speed), 1), {LONGEST_INTERVAL}));
      IF inflow > 0 AND NOT short THEN report_interval := {LONGEST_INTERVAL}; END IF;

      -- time_until_free
      wait_us := 0;
      IF free < cost THEN
        IF others <> 0 THEN
          wait_us := report_interval;
        ELSIF period = 0 THEN
          wait_us := (cost - free + rate - 1) / rate;
        ELSIF step = 0 THEN
          wait_us := window_ends_in;
        ELSE
          elapsed := now_us % period;
          x := capacity - s.previous * (cost - elapsed / step) - free;
          used := {floor_used};
          left_permits := most_permits - 1;
          IF used > left_permits THEN
            wait_us := period - elapsed + least((cost - left_permits * cost / used) * step, period);
          ELSIF s.previous > 0 THEN
            x := (cost - (left_permits - used) * cost / s.previous) * step;
            wait_us := greatest(least(x, period) - elapsed, 0);
          END IF;
        END IF;
      ELSIF oversubscribed AND rationed AND 2 * asked_demand < s.demand AND 2 * free < capacity THEN
        wait_us := report_interval;
      END IF;

      rec.seq := asked_seq;
      rec.leased_out := held + granted + room;
      expires := now_us + asked_ttl;
      IF period > 0 THEN expires := least(expires, now_us - now_us % period + period); END IF;
      rec.exp := CASE WHEN held > 0 THEN greatest(expires, rec.exp) ELSE expires END;
      rec.demand := asked_demand;
      rec.returned := asked_returned;
      rec.granted := granted;
      rec.debt := rec.debt + debt;
      rec.room := room;
      rec.inflow := inflow;
      s.inflow := s.inflow + inflow;
      s.exp := least(s.exp, rec.exp);
      IF rec.exp > now_us + {LONGEST_LEASE} THEN s.late := greatest(s.late, rec.exp); END IF;
      IF op = {release} THEN
        s.demand := s.demand - rec.demand;
        s.nodes := s.nodes - 1;
      END IF;
    END IF;

    -- save
    s.at := now_us;
    IF period > 0 THEN
      x := loaded - free;
      s.current := s.current + {floor_used};
      full_in := 2 * period;
    ELSE
      s.free := free;
      full_in := (capacity - free) / rate + 1;
    END IF;
    s.gone := greatest(s.gone - back, now_us + full_in + greatest(s.late - now_us, {LONGEST_LEASE}));
    UPDATE {p}_ledger l SET law = s.law, at = s.at, free = s.free, win = s.win, current = s.current,
      previous = s.previous, leased_out = s.leased_out, demand = s.demand, exp = s.exp, nodes = s.nodes, born = s.born,
      lost = s.lost, gone = s.gone, inflow = s.inflow, late = s.late
    WHERE l.key = row_key;
    IF NOT known THEN
      DELETE FROM {p}_lease l WHERE l.key = row_key;  -- of a ledger that was gone
    END IF;
    IF back > 0 THEN UPDATE {p}_lease l SET exp = l.exp - back WHERE l.key = row_key; END IF;
    IF burned THEN DELETE FROM {p}_lease l WHERE l.key = row_key AND l.exp <= now_us; END IF;
    IF status <> {OK} THEN
      answer := answer || ARRAY[status, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]::bigint[];
      CONTINUE;
    END IF;
    IF op = {release} THEN
      DELETE FROM {p}_lease l WHERE l.key = row_key AND l.node = rec.node;
    ELSIF has_record THEN
      UPDATE {p}_lease l SET lease_id = rec.lease_id, seq = rec.seq, leased_out = rec.leased_out, exp = rec.exp,
        demand = rec.demand, returned = rec.returned, granted = rec.granted, debt = rec.debt, room = rec.room,
        inflow = rec.inflow
      WHERE l.key = row_key AND l.node = rec.node;
    ELSE
      INSERT INTO {p}_lease VALUES (rec.*);
    END IF;
    answer := answer || ARRAY[{OK}, rec.lease_id, granted, held + granted, free_before, free, others, node_count,
      wait_us, report_interval, window_ends_in, oversubscribed::integer, s.current, s.previous, room, inflow];
  END LOOP;
  IF pages > 0 THEN PERFORM {p}_sweep_ledgers(pages, time_us); END IF;
  RETURN answer;
END $body$;
"""


def _floor(number: str, divisor: str) -> str:
    """*number* divided by *divisor* and rounded down, where PostgreSQL rounds towards zero."""
    return f"({number} - ({number} % {divisor} + {divisor}) % {divisor}) / {divisor}"


def _withheld(inflow: str) -> str:
    """The part *inflow* of the units *came*, rounded up, as `headgate.hybrid.ledger.withheld` does."""
    parts = protocol.PARTS
    return f"({inflow} * (came / {parts}) + ({inflow} * (came % {parts}) + {parts - 1}) / {parts})"


def sync_function(prefix: str, clock: str) -> str:
    """The statement that makes the function; *clock* is the time in its SQL."""
    names = {name: getattr(protocol, name) for name in _SHARED_NAMES}
    names |= {"FOREVER": FOREVER, "STEP": STEP, "MOST": MOST, "NUMBERS": NUMBERS}
    names |= {"LONGEST_INTERVAL": LONGEST_INTERVAL, "LONGEST_LEASE": LONGEST_LEASE}
    floors = {"floor_free": _floor("s.free", "x"), "floor_used": _floor("x", "cost")}
    floors |= {"withheld_all": _withheld("s.inflow"), "withheld": _withheld("inflow")}
    return FUNCTION.format(p=prefix, clock=clock, **names, **floors, **OPERATIONS)


def sync_sql(prefix: str) -> str:
    """The statement that calls the function."""
    types = ["bigint", "text[]", "integer[]", "integer[]", "integer[]", "text[]", "text[]"]
    types += ["bigint[]", "integer[]", "bigint[]", "integer"]
    return f"SELECT {prefix}_sync({parameters(types)})"
