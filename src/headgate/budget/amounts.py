"""Amounts of a budget: what its quotas mean in units, and how much a caller asks for.

Counts (requests, tokens) are whole numbers. Money is counted in whole nano-units, a billionth of a dollar: text or a
`Decimal`, never a float, which cannot hold a cent exactly. An amount is money if it has the name of a currency (usd,
eur, ...) or if its quota is written with a decimal point.

A quota is a bucket of *room* units that drains *rate* units a microsecond; one of an amount costs *cost* units. They
are whole numbers below 2**53, which the Lua script counts exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation
from math import gcd
from typing import Final, NamedTuple
from urllib.parse import quote

from headgate.errors import InvalidPermits, InvalidQuota, PermitsExceedLimit
from headgate.quota import Quota

Amount = int | str | Decimal
AnyQuota = str | Quota | Sequence[str | Quota]

NANO: Final = 1_000_000_000
_CODES = """
aed ars aud brl cad chf clp cny cop czk dkk eur gbp hkd huf idr ils inr jpy krw
mxn myr nok nzd pen php pln ron rub sar sek sgd thb try twd uah usd vnd zar
"""
CURRENCIES = frozenset(_CODES.split())
RESERVED = frozenset({"key", "id", "timeout"})  # parameters of `reserve`

_EXACT: Final = 1 << 52
_CONTEXT: Final = Context(prec=64, traps=[InvalidOperation, Inexact])  # that of the program may round
_MOST_MONEY: Final = 1_000_000
_MOST_COUNT: Final = 1_000_000_000  # of one amount in one call
_MONEY_QUOTA = re.compile(
    r"\s*(?P<limit>\d[\d_,]*(\.\d{1,9})?)(?P<period>\s*(?:/|\s+per\s+).*?)(\s+burst\s+(?P<burst>\d[\d_,]*(\.\d{1,9})?))?\s*",
    re.IGNORECASE | re.ASCII,
)


class BucketSpec(NamedTuple):
    """The bucket of one quota of one amount, on one level of a hierarchy."""

    level: int
    amount: int  # its number
    label: str
    cost: int
    room: int
    rate: int


class Amounts:
    """The amounts of a budget, in their order, with the buckets of their quotas: those of each level of a hierarchy."""

    def __init__(self, levels: Sequence[Mapping[str, AnyQuota]]) -> None:
        self.levels = tuple(levels)
        self.names = tuple(dict.fromkeys(name for quotas in levels for name in quotas))
        self.numbers = {name: number for number, name in enumerate(self.names)}
        if not self.names:
            raise InvalidQuota("a budget needs an amount with a quota, such as Budget(tokens='200000/minute')")
        listed = [{name: _listed(name, given) for name, given in quotas.items()} for quotas in levels]
        self.money = [name in CURRENCIES or any(map(_is_decimal, _all(listed, name))) for name in self.names]
        self.capacities = [0] * len(self.names)  # the least of each amount's quotas
        self.buckets: list[BucketSpec] = []
        self._costs: list[tuple[int, int]] = []  # of each bucket: the amount, and what one of it costs
        for level, quotas in enumerate(listed):
            for name, several in quotas.items():
                self._add(level, name, several)

    def _add(self, level: int, name: str, quotas: list[str | Quota]) -> None:
        number = self.numbers[name]
        for quota in quotas:
            limit, period_us, capacity = _money_quota(quota) if self.money[number] else _count_quota(quota)
            cost, rate = _units(limit, period_us, capacity)
            if rate == 0:
                raise InvalidQuota(f"{name}: {quota} would take too long to fill; choose a smaller burst")
            self.capacities[number] = min(self.capacities[number] or capacity, capacity)
            label = quote(
                f"b{name}/{limit}/{period_us}/{capacity}", safe="/"
            )  # b: no h or w, which begin an id's field
            self.buckets.append(BucketSpec(level, number, label, cost, capacity * cost, rate))
            self._costs.append((number, cost))

    def number(self, name: str) -> int:
        found = self.numbers.get(name)
        if found is None:
            raise TypeError(f"this budget has no amount {name!r:.80}; it has {', '.join(self.names)}")
        return found

    def encode(self, amounts: dict[str, Amount], values: list[int] | None = None) -> list[int]:
        """The *amounts* as whole numbers (of nano-units, for money) in order, written into *values* if it is given."""
        if values is None:
            values = [0] * len(self.names)
        for name, amount in amounts.items():
            number = self.numbers.get(name, -1)
            if number < 0:
                number = self.number(name)  # raises
            if type(amount) is int and not self.money[number] and 0 <= amount <= _MOST_COUNT:
                values[number] = amount
            else:
                values[number] = _nano(name, amount) if self.money[number] else _count(name, amount)
        return values

    def check_capacity(self, values: list[int]) -> None:
        """Raise if *values* are more than can ever be had at once."""
        for number, value in enumerate(values):
            capacity = self.capacities[number]
            if value > capacity:
                name = self.names[number]
                shown, most = self.decode(number, value), self.decode(number, capacity)
                raise PermitsExceedLimit(
                    f"{name}={shown} is more than the budget of {most}: no wait would be long enough"
                )

    def decode(self, number: int, value: int) -> int | Decimal:
        """The value of an amount as callers read it."""
        return _CONTEXT.divide(Decimal(value), NANO) if self.money[number] else value

    def read(self, values: Sequence[int]) -> dict[str, int | Decimal]:
        return {name: self.decode(number, values[number]) for number, name in enumerate(self.names)}

    def units(self, values: list[int]) -> list[int]:
        """What *values* cost in each bucket."""
        return [values[number] * cost for number, cost in self._costs]

    def values(self, units: Sequence[int]) -> list[int]:
        """The values that cost *units*, as of a hold."""
        values = [0] * len(self.names)
        for bucket, each in zip(self.buckets, units, strict=True):
            values[bucket.amount] = each // bucket.cost
        return values

    def least(self, available: Sequence[int]) -> list[int]:
        """How much of each amount there is, by what is *available* in each bucket; 0 if there is a debt."""
        values = list(self.capacities)
        for bucket, units in zip(self.buckets, available, strict=True):
            values[bucket.amount] = max(min(values[bucket.amount], units // bucket.cost), 0)
        return values


def _listed(name: str, given: AnyQuota) -> list[str | Quota]:
    if not isinstance(name, str) or name in RESERVED:
        raise ValueError(f"an amount cannot be called {name!r}, as reserve() has a parameter of that name")
    if isinstance(given, str | Quota):
        return [given]
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, str | Quota) for each in given):
        raise InvalidQuota(f"{name} must be a quota or a list of them, such as '1000/minute', got {given!r:.80}")
    return list(dict.fromkeys(given))


def _all(levels: Sequence[Mapping[str, list[str | Quota]]], name: str) -> list[str | Quota]:
    return [quota for quotas in levels for quota in quotas.get(name, ())]


def _is_decimal(quota: str | Quota) -> bool:
    found = _MONEY_QUOTA.fullmatch(quota) if isinstance(quota, str) else None
    return found is not None and ("." in found["limit"] or "." in (found["burst"] or ""))


def _count_quota(quota: str | Quota) -> tuple[int, int, int]:
    parsed = Quota.parse(quota)
    return parsed.limit, parsed.period_us, parsed.capacity


def _money_quota(quota: str | Quota) -> tuple[int, int, int]:
    """Limit, period and capacity, in nano-units and microseconds."""
    if isinstance(quota, Quota):
        limit, period_us, capacity = quota.limit * NANO, quota.period_us, quota.capacity * NANO
    else:
        found = _MONEY_QUOTA.fullmatch(quota) if isinstance(quota, str) else None
        if found is None:
            raise InvalidQuota(
                f"cannot read the quota {quota!r:.80}; write money such as '50/day' or '0.25/hour burst 2'"
            )
        period_us = Quota.parse("1" + found["period"]).period_us
        limit = _in_nano(found["limit"])
        capacity = limit if found["burst"] is None else _in_nano(found["burst"])
    if not 0 < limit <= _MOST_MONEY * NANO or not 0 < capacity <= _MOST_MONEY * NANO:
        raise InvalidQuota(f"money must be more than 0 and at most {_MOST_MONEY:,} in a quota, got {quota!s:.80}")
    return limit, period_us, capacity


def _in_nano(text: str) -> int:
    whole, _, decimals = text.replace(",", "").replace("_", "").partition(".")
    return int(whole) * NANO + int(decimals.ljust(9, "0"))


def _units(limit: int, period_us: int, capacity: int) -> tuple[int, int]:
    """(units that one costs, units that a microsecond brings): exact, or a little less than the quota allows."""
    common = gcd(period_us, limit)
    cost, rate = period_us // common, limit // common
    if capacity * cost <= _EXACT:
        return cost, rate
    rate = limit * (_EXACT // capacity) // period_us  # the finest that fits
    return -(-period_us * rate // limit), rate


def _count(name: str, amount: object) -> int:
    if isinstance(amount, bool) or not isinstance(amount, int):
        hint = (
            "write its quota with a decimal point ('50.00/day') if it is money" if not isinstance(amount, int) else ""
        )
        raise InvalidPermits(f"{name} must be a whole number of at least 0, got {amount!r:.80}; {hint}".rstrip("; "))
    if not 0 <= amount <= _MOST_COUNT:
        raise InvalidPermits(f"{name} must be a whole number from 0 to {_MOST_COUNT:,}, got {amount}")
    return amount


def _nano(name: str, amount: object) -> int:
    form = "write text or a Decimal with at most nine decimals, such as '0.0125'"
    if isinstance(amount, bool) or not isinstance(amount, int | str | Decimal):
        floats = ", as a float cannot hold a cent exactly" if isinstance(amount, float) else ""
        raise InvalidPermits(f"{name} is money and must not be {type(amount).__name__} {amount!r:.40}{floats}; {form}")
    try:
        nano = _CONTEXT.multiply(Decimal(amount), NANO)
        whole = nano == nano.to_integral_value(context=_CONTEXT)
    except (InvalidOperation, Inexact):
        whole = False
        nano = Decimal(0)
    if not whole or not 0 <= nano <= _MOST_MONEY * NANO:
        raise InvalidPermits(f"{name} must be money from 0 to {_MOST_MONEY:,}, got {amount!r:.80}; {form}")
    return int(nano)
