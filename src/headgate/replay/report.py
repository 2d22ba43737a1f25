"""The figures of a replay as one document, which is printed as JSON or as text, and conditions on them for CI."""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from headgate.replay.decide import ReplayOutcome
from headgate.replay.suggest import Suggestion
from headgate.replay.traffic import Traffic

BARS = 60  # of the timeline
SHOWN_KEYS = 20

CONDITIONS = ("denied", "keys_denied", "new_denied", "lockout")
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*(%|s)?\s*")


def report(
    traffic: Traffic,
    new: ReplayOutcome | None,
    old: ReplayOutcome | None = None,
    suggestions: Sequence[Suggestion] = (),
) -> dict[str, Any]:
    """All that a replay found. Times are ISO 8601 in UTC, durations seconds, shares from 0 to 1."""
    times = traffic.times
    found: dict[str, Any] = {
        "requests": len(traffic),
        "keys": len(traffic.names),
        "skipped": dict(traffic.skipped),
        "from": _iso(times[0]) if times else None,
        "to": _iso(times[-1]) if times else None,
    }
    if new is not None:
        found["limit"] = _outcome(traffic, new)
    if new is not None and old is not None:
        found["against"] = _outcome(traffic, old)
        found |= _changes(traffic, old, new)
    found["suggestions"] = [
        {
            "quota": str(each.quota),
            "algorithm": each.algorithm,
            "keys_refused": each.keys_refused,
            "keys_share": _share(each.keys_refused, len(traffic.names)),
            "refused": each.requests_refused,
            "share": _share(each.requests_refused, len(traffic)),
        }
        for each in suggestions
    ]
    return found


def _outcome(traffic: Traffic, outcome: ReplayOutcome) -> dict[str, Any]:
    worst = sorted(outcome.keys.items(), key=lambda item: -item[1].refused)[:SHOWN_KEYS]
    totals = Counter(key for key in traffic.keys if key in dict(worst)) if worst else Counter()
    return {
        "rule": outcome.rule.label,
        "refused": outcome.refused,
        "share": _share(outcome.refused, len(traffic)),
        "keys_refused": len(outcome.keys),
        "keys_share": _share(len(outcome.keys), len(traffic.names)),
        "longest_lockout": outcome.longest_lockout / 1_000_000,
        "worst": [
            {
                "key": traffic.names[key],
                "requests": totals[key],
                "refused": refused.refused,
                "first": _iso(refused.first),
                "last": _iso(refused.last),
                "longest_lockout": refused.longest_lockout / 1_000_000,
            }
            for key, refused in worst
        ],
        "timeline": timeline(traffic, outcome),
    }


def timeline(traffic: Traffic, outcome: ReplayOutcome) -> list[dict[str, Any]]:
    """The requests of the log and those that were refused, in stretches of equal length."""
    times = traffic.times
    if not times:
        return []
    length = max((times[-1] - times[0]) // BARS + 1, 1)
    bars, begun = [], 0
    for number in range((times[-1] - times[0]) // length + 1):
        start = times[0] + number * length
        end = bisect_left(times, start + length)
        refused = outcome.verdicts.count(0, begun, end)
        bars.append({"from": _iso(start), "requests": end - begun, "refused": refused})
        begun = end
    return bars


def _changes(traffic: Traffic, old: ReplayOutcome, new: ReplayOutcome) -> dict[str, Any]:
    """What the new limit refuses that the old one did not, and the other way round."""
    newly: Counter[int] = Counter()
    allowed = 0
    for key, before, now in zip(traffic.keys, old.verdicts, new.verdicts, strict=True):
        if before > now:
            newly[key] += 1
        elif now > before:
            allowed += 1
    refused = newly.total()
    return {
        "newly_refused": refused,
        "newly_refused_share": _share(refused, len(traffic)),
        "newly_allowed": allowed,
        "newly_refused_keys": [
            {"key": traffic.names[key], "refused": count, "before": old.keys[key].refused if key in old.keys else 0}
            for key, count in newly.most_common(SHOWN_KEYS)
        ],
    }


def check_condition(text: str) -> None:
    """Raise `ValueError` if *text* is no condition."""
    found = _CONDITION.fullmatch(text)
    if not found or found[1] not in CONDITIONS or (found[4] == "s") != (found[1] == "lockout" and found[4] is not None):
        forms = "denied, keys_denied or new_denied with a number or a percentage, or lockout in seconds"
        raise ValueError(f"a condition is {forms}, such as 'denied > 0.1%' or 'lockout > 60s', got {text!r:.80}")


def holds(text: str, found: dict[str, Any]) -> bool:
    """Whether the condition *text* is true of a report."""
    check_condition(text)
    name, compare, number, unit = _CONDITION.fullmatch(text).groups()  # type: ignore[union-attr]  # it was checked
    if name == "new_denied" and "newly_refused" not in found:
        raise ValueError("new_denied needs --against: what the old limit refused")
    limit = found.get("limit", {})
    counts = {
        "denied": (limit.get("refused", 0), found["requests"]),
        "keys_denied": (limit.get("keys_refused", 0), found["keys"]),
        "new_denied": (found.get("newly_refused", 0), found["requests"]),
        "lockout": (limit.get("longest_lockout", 0), 1),
    }
    count, whole = counts[name]
    value = count * 100 / (whole or 1) if unit == "%" else count
    return bool(_COMPARE[compare](value, float(number)))


def as_text(found: dict[str, Any]) -> Iterator[str]:
    """The lines that a person reads."""
    yield f"{found['requests']:,} requests of {found['keys']:,} keys, {found['from']} to {found['to']}"
    for why, count in found["skipped"].items():
        yield f"{count:,} {'line' if count == 1 else 'lines'} left out: {why}"
    for title in ("against", "limit"):
        if title not in found:
            continue
        limit = found[title]
        yield ""
        word = "old" if title == "against" else "new" if "against" in found else "limit"
        yield f"{word}: {limit['rule']}"
        yield _refusals(limit)
        if limit["refused"]:
            yield f"  longest lockout {limit['longest_lockout']:,.1f} s"
    if "newly_refused" in found:
        yield ""
        share = f"{found['newly_refused_share']:.3%}"
        yield f"newly refused: {found['newly_refused']:,} ({share}); newly allowed: {found['newly_allowed']:,}"
        for row in found["newly_refused_keys"][:10]:
            yield f"  {row['key']}: {row['refused']:,} newly refused, {row['before']:,} before"
    if found.get("limit", {}).get("worst"):
        yield ""
        yield "most refused:"
        for row in found["limit"]["worst"][:10]:
            when = f"{row['first']} to {row['last']}, longest lockout {row['longest_lockout']:,.1f} s"
            yield f"  {row['key']}: {row['refused']:,} of {row['requests']:,}, {when}"
    for row in found["suggestions"]:
        yield ""
        yield f"suggestion: {row['quota']} ({row['algorithm']})"
        yield _refusals(row)


def _refusals(row: dict[str, Any]) -> str:
    keys = f"{row['keys_refused']:,} keys ({row['keys_share']:.3%})"
    return f"  refuses {row['refused']:,} requests ({row['share']:.3%}) of {keys}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _iso(time: int) -> str:
    return datetime.fromtimestamp(time // 1_000_000, UTC).isoformat().replace("+00:00", "Z")
