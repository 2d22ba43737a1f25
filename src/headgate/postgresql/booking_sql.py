"""The table of slots and the function that books them: the twin of `headgate.algorithms.booking` in PL/pgSQL.

{prefix}_slot         a row for each slot. *freed* is 0, or the moment of a slot that was cancelled and that another
                      booking can have; *gone* is the end of its grace, or its moment
{prefix}_book         book or cancel one slot, or forget a key with its slots
{prefix}_sweep_slots  remove what is gone from a few pages, chosen at random
"""

from __future__ import annotations

from headgate.algorithms import ALGORITHMS
from headgate.algorithms.booking import BOOKED, DENIED, FREED_LOOKED_AT, KNOWN

BOOK, CANCEL, RESET = range(1, 4)  # operations

TABLES = """
CREATE UNLOGGED TABLE {p}_slot (
  key text COLLATE "C" NOT NULL, freed bigint NOT NULL, id text COLLATE "C" NOT NULL, permits bigint NOT NULL,
  moment bigint NOT NULL, paid_us bigint NOT NULL, paid_rest bigint NOT NULL, gone bigint NOT NULL,
  PRIMARY KEY (key, freed, id, permits)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
"""

# Rows are those of the quotas, sorted by key, with four numbers each. The answer to a booking: outcome, moment, now,
# permits, and for each row what is left and the time to full; to the others one number: whether it was done.
_BOOK = """
CREATE OR REPLACE FUNCTION {p}_book(
  at bigint, op integer, slot_key text, rows text[], numbers bigint[], permits bigint, id text, within bigint,
  grace bigint, pages integer
) RETURNS bigint[] LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_variable
DECLARE {variables}
  debts bigint[]; moments bigint[]; aheads boolean[]; made boolean[]; written boolean[]; answer bigint[];
  n1 bigint; n2 bigint; n3 bigint; n4 bigint; outcome integer := {DENIED}; known boolean; wait bigint := 0;
  moment bigint; many bigint := permits; paid_us bigint := -1; paid_rest bigint := 0; earlier bigint; waits bigint := 0;
BEGIN
  IF op = {RESET} THEN
    PERFORM 1 FROM {p}_state s WHERE s.key = ANY (rows) ORDER BY s.key FOR UPDATE;
    DELETE FROM {p}_state s WHERE s.key = ANY (rows);
    DELETE FROM {p}_slot s WHERE s.key = slot_key;
    RETURN ARRAY[1];
  END IF;
  FOR i IN 1..cardinality(rows) LOOP  -- calls about one key wait here for each other
    made[i] := false;
    LOOP
      SELECT s.a, s.b INTO a, b FROM {p}_state s WHERE s.key = rows[i] FOR UPDATE;
      EXIT WHEN FOUND;
      INSERT INTO {p}_state VALUES (rows[i], 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING;
      made[i] := FOUND;
    END LOOP;
    moments[i] := a; debts[i] := b;
  END LOOP;
  now_us := {clock};
  FOR i IN 1..cardinality(rows) LOOP
    {quota}
    a := moments[i]; b := debts[i];
    ahead := false;
    {load}
    debts[i] := b; aheads[i] := ahead; written[i] := false;
    asked := permits;
    {evaluate}
    wait := greatest(wait, wait_us);
  END LOOP;
  SELECT s.moment, s.permits, s.paid_us, s.paid_rest INTO moment, many, paid_us, paid_rest
  FROM {p}_slot s WHERE s.key = slot_key AND s.freed = 0 AND s.id = id AND s.gone >= now_us;
  known := FOUND;
  spent := 0;
  IF op = {CANCEL} AND known THEN
    DELETE FROM {p}_slot s WHERE s.key = slot_key AND s.freed = 0 AND s.id = id;
    n3 := numbers[3];
    IF paid_us = now_us + debts[1] / n3 AND paid_rest = debts[1] % n3 THEN  -- nothing was spent after it
      spent := -many;
      outcome := 1;
    ELSIF moment > now_us THEN
      INSERT INTO {p}_slot VALUES (slot_key, moment, id, many, moment, -1, 0, moment) ON CONFLICT DO NOTHING;
      outcome := 1;
    END IF;
  ELSIF op = {BOOK} AND known THEN
    outcome := {KNOWN};
  ELSIF op = {BOOK} THEN
    many := permits; paid_us := -1; paid_rest := 0;
    SELECT o.freed, o.id INTO earlier, row_id FROM (
      SELECT s.freed, s.id, s.permits FROM {p}_slot s
      WHERE s.key = slot_key AND s.freed > 0 AND s.freed >= now_us AND s.freed <= now_us + least(wait, within)
      ORDER BY s.freed, s.permits::text COLLATE "C", s.id LIMIT {FREED_LOOKED_AT}) o
    WHERE o.permits = permits ORDER BY o.freed, o.id LIMIT 1;
    IF FOUND THEN
      moment := earlier;
      DELETE FROM {p}_slot s WHERE s.key = slot_key AND s.freed = earlier AND s.id = row_id AND s.permits = permits;
      outcome := {BOOKED};
    ELSE
      moment := now_us + wait;
      IF wait <= within THEN
        spent := permits; waits := wait; outcome := {BOOKED};
      END IF;
    END IF;
  END IF;
  FOR i IN 1..cardinality(rows) LOOP
    {quota}
    IF spent <> 0 OR aheads[i] THEN
      b := greatest(debts[i] - waits * n3, 0) + waits * n3;  -- no less than what is paid until then
      {consume}
      UPDATE {p}_state s SET a = now_us, b = b, gone = gone WHERE s.key = rows[i];
      debts[i] := b; written[i] := true;
    END IF;
    IF made[i] AND NOT written[i] THEN DELETE FROM {p}_state s WHERE s.key = rows[i]; END IF;
    IF i = 1 AND spent > 0 THEN paid_us := now_us + b / n3; paid_rest := b % n3; END IF;
  END LOOP;
  IF outcome = {BOOKED} AND op = {BOOK} THEN
    DELETE FROM {p}_slot s WHERE s.key = slot_key AND s.freed = 0 AND s.id = id;  -- its grace was over
    INSERT INTO {p}_slot VALUES (slot_key, 0, id, permits, moment, paid_us, paid_rest, moment + grace);
  END IF;
  answer := CASE WHEN op = {CANCEL} THEN ARRAY[outcome::bigint] ELSE ARRAY[outcome, moment, now_us, many] END;
  FOR i IN 1..CASE WHEN op = {CANCEL} THEN 0 ELSE cardinality(rows) END LOOP
    {quota}
    b := debts[i]; asked := 0;
    {evaluate}
    answer := answer || left_permits || full_us;
  END LOOP;
  IF pages > 0 THEN
    PERFORM {p}_sweep(pages, now_us);
    PERFORM {p}_sweep_slots(pages, now_us);
  END IF;
  RETURN answer;
END $body$;
"""

_QUOTA = """
    n1 := numbers[4 * i - 3]; n2 := numbers[4 * i - 2]; n3 := numbers[4 * i - 1]; n4 := numbers[4 * i];
"""


def book_function(prefix: str, variables: str, clock: str) -> str:
    """The statement that makes the function."""
    sql = ALGORITHMS["token_bucket"].sql  # the three buckets are kept alike
    names = {"DENIED": DENIED, "BOOKED": BOOKED, "KNOWN": KNOWN, "FREED_LOOKED_AT": FREED_LOOKED_AT}
    names |= {"BOOK": BOOK, "CANCEL": CANCEL, "RESET": RESET}
    parts = {"load": sql.load, "evaluate": sql.evaluate, "consume": sql.consume, "quota": _QUOTA}
    variables += "row_id text;"
    return _BOOK.format_map({**names, **parts, "p": prefix, "variables": variables, "clock": clock})


def book_sql(prefix: str) -> str:
    """The statement of one call."""
    types = ("bigint", "integer", "text", "text[]", "bigint[]", "bigint", "text", "bigint", "bigint", "integer")
    return f"SELECT {prefix}_book({', '.join(f'${place}::{kind}' for place, kind in enumerate(types, start=1))})"
