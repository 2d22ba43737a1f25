"""The tables and functions of a PostgreSQL store, as SQL made for a prefix: the twins of all algorithms in one frame.

{prefix}_version  one row: the version of all this, `VERSION`
{prefix}_state    a row for each quota and key: four numbers that the quota's algorithm explains, and from when on they
                  say nothing (`gone`, epoch microseconds). No index but the key's, so that updates stay in their page
{prefix}_log      a row for each admitted call of a sliding window
{prefix}_check    decide one quota of one key: nearly every call
{prefix}_decide   decide any number of calls, each with any number of quotas, in one step
{prefix}_sweep    remove what is gone from a few pages, chosen at random; the two functions above call it

The tables and functions of slots and of hybrid limiters are made with them: `headgate.postgresql.booking_sql` and
`headgate.hybrid.ledger_sql` have those.

The tables are UNLOGGED: a decision waits for no disk, and a server that crashes comes back with empty ones.
A row is locked before the clock is read, and rows are locked in the order of their keys. `{prefix}_check` first reads
without a lock, so a denial only reads; its update takes effect only if the row is as it was read.
"""

from __future__ import annotations

import re

from headgate.algorithms import ALGORITHMS, VARIANTS
from headgate.algorithms.algorithm import AlgorithmSQL
from headgate.postgresql import booking_sql

VERSION = 4  # of the tables and functions; a change of any of them raises it
LOG = ALGORITHMS["sliding_window"].sql.number
TAKE, PEEK, REFUND, RESET, CHARGE = range(1, 6)  # operations
SHARE = 8  # an operation has so many times the millionths of the capacity that a take leaves, its floor
READ, LOCK, MAKE = range(3)  # what is done with a row first: only read, lock it if it is there, make it if it is not
FUNCTIONS = ("check", "decide", "sweep", "sweep_slots", "sweep_ledgers", "book", "sync")  # behind the prefix
FOREIGN = "HG001"  # SQLSTATE: tables of that name are not ours, or of another version

_LAWS: list[AlgorithmSQL] = sorted({spec.sql for spec in [*ALGORITHMS.values(), *VARIANTS.values()]})


def _chosen(part: str) -> str:
    """The statements of every law for *part*, of which those of the variable ``law`` are run."""
    arms = [f"law = {sql.number} THEN{getattr(sql, part)}" for sql in _LAWS]
    return "IF " + "ELSIF ".join(arms) + "ELSE RAISE 'unknown law %', law; END IF;\n"


_VARIABLES = """
  now_us bigint; a bigint; b bigint; c bigint; d bigint; kept_c bigint; gone bigint; x bigint; y bigint; asked bigint;
  spent bigint; left_permits bigint; full_us bigint; wait_us bigint; log_now bigint; entry record;
  ok boolean; ahead boolean; share bigint; kept bigint;
"""

_CLOCK = "coalesce(at, (date_part('epoch', clock_timestamp()) * 1000000)::bigint)"

_RESERVE = "CASE WHEN share > 0 THEN ceil(n1::numeric * share / 1000000)::bigint ELSE 0 END"  # what a take leaves

_TABLES = """
CREATE TABLE {p}_version (version integer NOT NULL);
INSERT INTO {p}_version VALUES ({version});
CREATE UNLOGGED TABLE {p}_state (
  key text COLLATE "C" PRIMARY KEY, a bigint NOT NULL, b bigint NOT NULL, c bigint NOT NULL, d bigint NOT NULL,
  gone bigint NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE UNLOGGED TABLE {p}_log (
  key text COLLATE "C" NOT NULL, total bigint NOT NULL, "time" bigint NOT NULL, PRIMARY KEY (key, total)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
"""

_SWEEP = """
CREATE OR REPLACE FUNCTION {sweep}(pages integer, now_us bigint) RETURNS void LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_variable
DECLARE
  size bigint := pg_relation_size('{rows}') / current_setting('block_size')::bigint;
  page bigint; rows tid[]; keys text[];
BEGIN
  FOR i IN 1..pages LOOP
    page := floor(random() * size);
    SELECT array_agg(old.ctid), array_agg(old.key) INTO rows, keys FROM (
      SELECT s.ctid, s.key FROM {rows} s
      WHERE s.ctid >= format('(%s,0)', page)::tid AND s.ctid < format('(%s,0)', page + 1)::tid AND s.gone < now_us
      FOR UPDATE SKIP LOCKED) old;  -- it waits for no other call, so it can be in no deadlock
    IF rows IS NOT NULL THEN
      DELETE FROM {rows} s WHERE s.ctid = ANY (rows);
      {more}
    END IF;
  END LOOP;
END $body$;
"""

_CHECK = """
CREATE OR REPLACE FUNCTION {p}_check(
  at bigint, op integer, law integer, row_key text, permits bigint, n1 bigint, n2 bigint, n3 bigint, n4 bigint,
  pages integer
) RETURNS bigint[] LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_variable
DECLARE {variables}
  locked boolean := law = {LOG}; there boolean; kept_a bigint; kept_b bigint; kept_d bigint;
BEGIN
  share := op / {SHARE};
  op := op % {SHARE};
  kept := {reserve};
  LOOP
    IF locked THEN
      SELECT s.a, s.b, s.c, s.d INTO a, b, c, d FROM {p}_state s WHERE s.key = row_key FOR UPDATE;
    ELSE
      SELECT s.a, s.b, s.c, s.d INTO a, b, c, d FROM {p}_state s WHERE s.key = row_key;
    END IF;
    there := FOUND;
    IF NOT there THEN
      IF locked AND op = {TAKE} THEN  -- a log needs its row locked before it is written
        INSERT INTO {p}_state VALUES (row_key, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING;
        CONTINUE WHEN NOT FOUND;
        there := true;
      END IF;
      a := 0; b := 0; c := 0; d := 0;
    END IF;
    now_us := {clock};
    kept_a := a; kept_b := b; kept_c := c; kept_d := d;
    asked := permits + kept;
    ahead := false;
    {load}
    {evaluate}
    IF kept > 0 AND ok THEN
      asked := permits;
      {evaluate}
    END IF;
    EXIT WHEN op = {PEEK} OR NOT (ok OR ahead);
    spent := CASE WHEN ok THEN permits ELSE 0 END;
    {consume}
    IF there THEN
      UPDATE {p}_state s SET a = a, b = b, c = c, d = d, gone = gone
      WHERE s.key = row_key AND s.a = kept_a AND s.b = kept_b AND s.c = kept_c AND s.d = kept_d;
    ELSE
      INSERT INTO {p}_state VALUES (row_key, a, b, c, d, gone) ON CONFLICT DO NOTHING;
    END IF;
    EXIT WHEN FOUND;
    locked := true;  -- another call came first: wait in line this time
  END LOOP;
  IF pages > 0 THEN PERFORM {p}_sweep(pages, now_us); END IF;
  RETURN ARRAY[ok::integer, left_permits, full_us, wait_us];
END $body$;
"""

# Rows are sorted by key, each once. Calls come one after another, each with as many parts as its size says; a part is
# one quota: its row, its law, the permits and four numbers. The answer has four numbers for each part: whether the
# quota allows, permits left, time to full, time to wait. Left and full are as if nothing was asked if the call as a
# whole is denied.
_DECIDE = """
CREATE OR REPLACE FUNCTION {p}_decide(
  at bigint, rows text[], locks integer[], ops integer[], sizes integer[],
  part_rows integer[], laws integer[], permits bigint[], numbers bigint[], pages integer
) RETURNS bigint[] LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_variable
DECLARE {variables}
  as_ bigint[]; bs bigint[]; cs bigint[]; ds bigint[]; gones bigint[]; found_rows boolean[]; changed boolean[];
  answer bigint[]; r integer; law integer; row_key text; op integer; first integer; last integer := 0; many bigint;
  allowed boolean; fullest bigint; fewest bigint; n1 bigint; n2 bigint; n3 bigint; n4 bigint;
BEGIN
  FOR r IN 1..cardinality(rows) LOOP
    row_key := rows[r];
    changed[r] := false;
    LOOP
      IF locks[r] = {READ} THEN
        SELECT s.a, s.b, s.c, s.d INTO a, b, c, d FROM {p}_state s WHERE s.key = row_key;
      ELSE
        SELECT s.a, s.b, s.c, s.d INTO a, b, c, d FROM {p}_state s WHERE s.key = row_key FOR UPDATE;
      END IF;
      found_rows[r] := FOUND;
      IF NOT FOUND THEN
        a := 0; b := 0; c := 0; d := 0;
        IF locks[r] = {MAKE} THEN
          INSERT INTO {p}_state VALUES (row_key, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING;
          CONTINUE WHEN NOT FOUND;
        END IF;
      END IF;
      EXIT;
    END LOOP;
    as_[r] := a; bs[r] := b; cs[r] := c; ds[r] := d;
  END LOOP;
  now_us := {clock};
  FOR i IN 1..cardinality(sizes) LOOP
    op := ops[i] % {SHARE};
    share := ops[i] / {SHARE};
    first := last + 1;
    last := last + sizes[i];
    allowed := true;
    fullest := 0;
    fewest := permits[first];
    FOR step IN 1..2 LOOP  -- evaluate all parts, and then spend from all; or look at all if one denies
      FOR j IN first..last LOOP
        r := part_rows[j];
        law := laws[j];
        row_key := rows[r];
        IF op = {RESET} THEN
          as_[r] := 0; bs[r] := 0; cs[r] := 0; ds[r] := 0; gones[r] := 0;
          changed[r] := found_rows[r];
          IF law = {LOG} THEN DELETE FROM {p}_log l WHERE l.key = row_key; END IF;
          answer[4 * j - 3] := 1; answer[4 * j - 2] := 0; answer[4 * j - 1] := 0; answer[4 * j] := 0;
          CONTINUE;
        END IF;
        a := as_[r]; b := bs[r]; c := cs[r]; d := ds[r]; kept_c := c;
        n1 := numbers[4 * j - 3]; n2 := numbers[4 * j - 2]; n3 := numbers[4 * j - 1]; n4 := numbers[4 * j];
        ahead := false;
        {load}
        IF step = 1 OR NOT allowed THEN
          asked := CASE WHEN step = 1 AND op IN ({TAKE}, {PEEK}) THEN permits[j] ELSE 0 END;
          kept := CASE WHEN step = 1 THEN {reserve} ELSE 0 END;
          asked := asked + kept;
          {evaluate}
          IF kept > 0 AND ok THEN
            asked := asked - kept;
            {evaluate}
          END IF;
          IF step = 1 THEN
            answer[4 * j - 3] := ok::integer;
            answer[4 * j] := wait_us;
            allowed := allowed AND ok;
          END IF;
          answer[4 * j - 2] := left_permits;
          answer[4 * j - 1] := full_us;
          fullest := greatest(fullest, full_us);
          fewest := least(fewest, left_permits);
          CONTINUE WHEN step = 1 OR NOT ahead OR op <> {TAKE};
          spent := 0;
        ELSE
          spent := CASE op WHEN {TAKE} THEN permits[j] WHEN {CHARGE} THEN fewest ELSE -permits[j] END;
          CONTINUE WHEN op = {REFUND} AND NOT found_rows[r] AND NOT changed[r];
        END IF;
        {consume}
        as_[r] := a; bs[r] := b; cs[r] := c; ds[r] := d; gones[r] := gone;
        changed[r] := true;
      END LOOP;
      EXIT WHEN op IN ({PEEK}, {RESET}) AND allowed OR op = {REFUND} AND fullest = 0 OR op = {CHARGE} AND fewest <= 0;
    END LOOP;
  END LOOP;
  FOR r IN 1..cardinality(rows) LOOP
    IF changed[r] AND gones[r] > 0 THEN
      UPDATE {p}_state s SET a = as_[r], b = bs[r], c = cs[r], d = ds[r], gone = gones[r] WHERE s.key = rows[r];
    ELSIF changed[r] OR locks[r] = {MAKE} AND NOT found_rows[r] THEN  -- nothing is left, or nothing was spent
      DELETE FROM {p}_state s WHERE s.key = rows[r];
    END IF;
  END LOOP;
  IF pages > 0 THEN PERFORM {p}_sweep(pages, now_us); END IF;
  RETURN answer;
END $body$;
"""

# All of it is one transaction, and one process at a time runs it: each statement sees what the process before has made.
_CREATE = """
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL client_min_messages = error;
SELECT pg_advisory_xact_lock(hashtext('headgate ' || current_schema() || '.{p}'));
DO $do$
DECLARE found_version integer; foreign_names text; dropped text;
BEGIN
  IF to_regclass('{p}_version') IS NULL THEN
    SELECT string_agg(name, ', ') INTO foreign_names
    FROM unnest(ARRAY['{p}_state', '{p}_log', '{p}_slot', '{p}_ledger', '{p}_lease']) name
    WHERE to_regclass(name) IS NOT NULL;
    IF foreign_names IS NOT NULL THEN
      RAISE EXCEPTION 'the database has a table % that is not of headgate; choose another prefix', foreign_names
        USING ERRCODE = '{FOREIGN}';
    END IF;
    {tables}
  ELSE
    BEGIN
      SELECT max(v.version) INTO found_version FROM {p}_version v;
    EXCEPTION WHEN undefined_column THEN
      RAISE EXCEPTION 'the database has a table {p}_version that is not of headgate; choose another prefix'
        USING ERRCODE = '{FOREIGN}';
    END;
    IF found_version IS DISTINCT FROM {version} THEN
      {other_version}
    END IF;
  END IF;
END $do$;
{functions}
COMMIT;
"""

_REFUSE = """
      RAISE EXCEPTION 'the tables {p}_... are of version % and this headgate is of version {version}; {advice}',
        coalesce(found_version::text, 'unknown') USING ERRCODE = '{FOREIGN}';
"""

# Functions too: one of another version may have the same arguments and another result.
_REPLACE = """
      FOR dropped IN SELECT p.oid::regprocedure::text FROM pg_proc p
        WHERE p.pronamespace = current_schema()::regnamespace AND p.proname = ANY (ARRAY[{function_names}])
      LOOP
        EXECUTE 'DROP FUNCTION ' || dropped;
      END LOOP;
      DROP TABLE IF EXISTS {p}_state, {p}_log, {p}_slot, {p}_ledger, {p}_lease, {p}_version;
      {tables}
"""

ADVICE = (
    "stop what uses them and run `headgate migrate --replace URL`, which drops what they keep: all limits start anew; "
    "or use the headgate that made them, or another prefix"
)

_PREFIX = re.compile("[a-z_][a-z0-9_]{0,39}")


def check_prefix(prefix: object) -> str:
    """Return *prefix* if tables can be named by it; else raise a ValueError."""
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ValueError(f"prefix must be 1 to 40 of a-z, 0-9 and _, not starting with a digit, got {prefix!r:.60}")
    return prefix


def _fill(template: str, prefix: str, **more: str) -> str:
    """Put the names and the laws into *template*; the braces of its SQL are only those of names."""
    names = {"p": prefix, "version": VERSION, "LOG": LOG, "FOREIGN": FOREIGN, "variables": _VARIABLES, "clock": _CLOCK}
    names |= {"TAKE": TAKE, "PEEK": PEEK, "REFUND": REFUND, "RESET": RESET, "CHARGE": CHARGE, "READ": READ}
    names |= {"MAKE": MAKE, "SHARE": SHARE, "reserve": _RESERVE, "advice": ADVICE}
    laws = {part: _chosen(part).replace("{log}", f"{prefix}_log") for part in ("load", "evaluate", "consume")}
    later = {name: f"{{{name}}}" for name in ("tables", "functions", "other_version")}
    return template.format_map({**names, **laws, **later, **more})


def _sweep(name: str, rows: str, parts: str = "") -> str:
    """The function that sweeps *rows*, and the *parts* that have their keys."""
    more = f"DELETE FROM {parts} l WHERE l.key = ANY (keys);" if parts else ""
    return _SWEEP.format_map({"sweep": name, "rows": rows, "more": more})


def create_sql(prefix: str) -> str:
    """The statements that make everything that is not there yet; raises in the database if it is not ours."""
    return _create_sql(prefix, _fill(_REFUSE, prefix))


def replace_sql(prefix: str) -> str:
    """The same, but tables and functions of another version of ours are dropped, with what they keep."""
    names = ", ".join(f"'{prefix}_{name}'" for name in FUNCTIONS)
    return _create_sql(prefix, _fill(_REPLACE, prefix, function_names=names))


def _create_sql(prefix: str, other_version: str) -> str:
    from headgate.hybrid import ledger_sql  # it stands beside its Python twin

    tables = _fill(_TABLES + booking_sql.TABLES + ledger_sql.TABLES, prefix)
    functions = [
        _sweep(f"{prefix}_sweep", f"{prefix}_state", f"{prefix}_log"),
        _sweep(f"{prefix}_sweep_slots", f"{prefix}_slot"),
        _fill(_CHECK, prefix),
        _fill(_DECIDE, prefix),
        booking_sql.book_function(prefix, _VARIABLES, _CLOCK),
        _sweep(f"{prefix}_sweep_ledgers", f"{prefix}_ledger", f"{prefix}_lease"),
        ledger_sql.sync_function(prefix, _CLOCK),
    ]
    sql = _fill(_CREATE, prefix).replace("{other_version}", other_version)
    return sql.replace("{tables}", tables).replace("{functions}", "".join(functions))


def check_sql(prefix: str) -> str:
    """The statement of one quota and key."""
    types = ["bigint", "integer", "integer", "text", *["bigint"] * 5, "integer"]
    return f"SELECT {prefix}_check({parameters(types)})"


def decide_sql(prefix: str) -> str:
    """The statement of any number of calls."""
    types = ["bigint", "text[]", *["integer[]"] * 5, "bigint[]", "bigint[]", "integer"]
    return f"SELECT {prefix}_decide({parameters(types)})"


def hello_sql(prefix: str, timeout: float) -> str:
    """What a new connection asks first: the version of the tables. It also sets what a decision relies on."""
    milliseconds = max(1, round(timeout * 1000))
    return (
        f"SELECT v.version, set_config('statement_timeout', '{milliseconds}', false), "
        "set_config('default_transaction_isolation', 'read committed', false), "
        "set_config('default_transaction_deferrable', 'off', false), "
        f"pg_is_in_recovery(), current_setting('transaction_read_only') FROM {prefix}_version v"
    )


def parameters(types: list[str]) -> str:
    """The parameters of a call, each with its type."""
    return ", ".join(f"${number}::{kind}" for number, kind in enumerate(types, start=1))
