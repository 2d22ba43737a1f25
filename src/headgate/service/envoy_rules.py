"""Envoy's rate limits: from a call with its descriptors to the answer.

    rules = EnvoyRules(domains, settings, store, meter)
    response = rules.decide_now(request) or await rules.decide(request, timeout=0.02)

A reload makes new ones; the store keeps the counters of limits that have not changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING

from headgate._plan import arun, run
from headgate.clock import SYSTEM_CLOCK
from headgate.decision import Decision, decision
from headgate.errors import StoreUnavailable
from headgate.joint import JointCheck, try_acquire_all, try_acquire_all_async
from headgate.service import responses
from headgate.service.envoy_answers import NO_LIMIT, UNLIMITED, Answered, decided, respond, status
from headgate.service.envoy_limits import BadRateLimitRequest, EnvoyRule, EnvoyRuleMaker
from headgate.service.envoy_plan import DescriptorCheck, Plan, StoreStep, all_or_nothing, each_for_itself
from headgate.service.envoy_settings import EnvoyDomain, EnvoySettings, domain_text
from headgate.service.envoy_tree import DescriptorNode, counter_key
from headgate.service.rls_messages import (
    MAX_UINT32,
    OK,
    OVER_LIMIT,
    Descriptor,
    Entry,
    RateLimitRequest,
    RateLimitResponse,
)
from headgate.service.shared_counters import ALLOWED, SLOT_WORDS
from headgate.stores.base import Store, is_in_process

if TYPE_CHECKING:
    from headgate.service.app import App

MAX_SEEN = 16_384  # descriptors of a domain whose rule is remembered: the same few make most of the traffic
MAX_SEEN_TEXT = 512  # characters of one that is remembered: values may be headers of clients

Found = tuple[EnvoyRule, str]  # the rule that a descriptor meets, and the key of its counter


class DomainRules:
    """The rules of one domain, and the descriptors that came before."""

    __slots__ = ("name", "root", "seen")

    def __init__(self, domain: EnvoyDomain, maker: EnvoyRuleMaker) -> None:
        self.name = domain.domain
        self.root: DescriptorNode[EnvoyRule] = DescriptorNode()
        self.seen: dict[tuple[Entry, ...], Found | None] = {}
        for one in domain.descriptors:
            self.root.add(one, f"{domain_text(domain.domain)}/", maker.make)

    def find(self, entries: list[Entry]) -> Found | None:
        """The rule that *entries* meet and the key of their counter, or None."""
        known = tuple(entries)
        if known in self.seen:
            return self.seen[known]
        found = self.root.find(entries)
        if sum(len(key) + len(value) for key, value in entries) <= MAX_SEEN_TEXT:
            if len(self.seen) >= MAX_SEEN:
                self.seen.clear()
            self.seen[known] = found
        return found


class EnvoyRules:
    """All rules of one reading of the files, ready to decide. Without a *meter*, decisions are not counted."""

    def __init__(
        self, domains: Sequence[EnvoyDomain], settings: EnvoySettings, store: Store, meter: EnvoyMeter | None = None
    ) -> None:
        self._meter = meter
        self._maker = EnvoyRuleMaker(settings, store, meter)
        self._in_process = is_in_process(store)
        self._now = (getattr(store, "clock", None) or SYSTEM_CLOCK).now
        self._each = settings.counting == "each"
        self._plan: Callable[[Sequence[DescriptorCheck]], Plan] = each_for_itself if self._each else all_or_nothing
        self._headers = settings.headers
        self.domains = {one.domain: DomainRules(one, self._maker) for one in domains}

    def info(self) -> list[dict[str, object]]:
        """The domains as /actuator/info shows them."""
        return [{"domain": name, "rules": domain.root.count()} for name, domain in self.domains.items()]

    def decide_now(self, request: RateLimitRequest) -> RateLimitResponse | None:
        """The answer, or None if it must be awaited. Raises `BadRateLimitRequest` and `StoreUnavailable`."""
        if not self._in_process:
            return None
        began = perf_counter_ns()
        descriptors = request.descriptors
        if len(descriptors) == 1 and not self._headers:
            found = self._find_plain(request.domain, descriptors[0], request.hits_addend)
            if found is not None:
                return self._take_one(*found, began)
        answers, checks = self._checks(request)
        if not checks:
            return respond(answers, True, 0, self._headers)
        try:
            allowed = run(self._plan(checks), _step_now)
        except StoreUnavailable as error:
            self._count_unanswered(checks[0].rule, checks[0].key, error)
            raise
        self._record(checks, allowed, perf_counter_ns() - began)
        return respond(answers, allowed, self._now(), self._headers)

    async def decide(self, request: RateLimitRequest, timeout: float | None) -> RateLimitResponse:
        """The answer; after *timeout* seconds without one from the store it is that of on_store_error."""
        began = perf_counter_ns()
        answers, checks = self._checks(request)
        if not checks:
            return respond(answers, True, 0, self._headers)
        try:
            allowed = await arun(self._plan(checks), StoreSteps(timeout).answer)
        except StoreUnavailable as error:
            self._count_unanswered(checks[0].rule, checks[0].key, error)
            raise
        self._record(checks, allowed, perf_counter_ns() - began)
        return respond(answers, allowed, self._now(), self._headers)

    def _find_plain(self, domain: str, descriptor: Descriptor, hits_addend: int) -> Found | None:
        """The rule and the key of a descriptor of one hit, if `_take_one` can decide it."""
        hits = descriptor.hits if descriptor.hits is not None else hits_addend or 1
        known = self.domains.get(domain)
        if hits != 1 or known is None or descriptor.limit is not None:
            return None
        found = known.find(descriptor.entries)
        return found if found is not None and found[0].plain else None

    def _take_one(self, rule: EnvoyRule, key: str, began: int) -> RateLimitResponse:
        """Decide one hit of one descriptor in this process: what the plans do, without one."""
        assert rule.take_now is not None
        try:
            made = rule.take_now(key, 1)
        except StoreUnavailable as error:
            self._count_unanswered(rule, key, error)
            raise
        if self._meter is not None:
            self._meter.record(rule, key, made, perf_counter_ns() - began)
        allowed = made.allowed
        return RateLimitResponse(OK if allowed else OVER_LIMIT, [status(rule, made, not allowed, self._now())])

    def _checks(self, request: RateLimitRequest) -> tuple[list[Answered], list[DescriptorCheck]]:
        """For each descriptor its check, or its status if it needs none; and the checks."""
        if not request.domain:
            raise BadRateLimitRequest("the domain is empty; give the domain of a file")
        if not request.descriptors:
            raise BadRateLimitRequest("there are no descriptors; give at least one")
        domain = self.domains.get(request.domain)
        found = [None if domain is None else self._find(domain, one) for one in request.descriptors]
        replaced = {name for one in found if one is not None for name in one[0].replaces}
        answers: list[Answered] = []
        checks: list[DescriptorCheck] = []
        for descriptor, one in zip(request.descriptors, found, strict=True):
            if one is None or one[0].unlimited:
                answers.append(NO_LIMIT if one is None else UNLIMITED)
                self._count_free(one)
            elif one[0].limit[0] in replaced:
                answers.append(NO_LIMIT)
            else:
                rule, key = one
                hits = descriptor.hits if descriptor.hits is not None else request.hits_addend or 1
                drain = self._each or (rule.drain and descriptor.hits is not None)
                checks.append(DescriptorCheck(rule, key, hits, drain))
                answers.append(checks[-1])
        return answers, checks

    def _find(self, domain: DomainRules, descriptor: Descriptor) -> Found | None:
        if descriptor.limit is None:
            return domain.find(descriptor.entries)
        return self._maker.override(domain.name, descriptor.limit), counter_key(descriptor.entries) or "="

    def _record(self, checks: Sequence[DescriptorCheck], allowed: bool, nanoseconds: int) -> None:
        """Count the decisions; of a call that is over a limit, those of the rules that refuse it."""
        if self._meter is None:
            return
        for check in checks:
            if allowed or (check.refused and not check.rule.shadow):
                self._meter.record(check.rule, check.key, decided(check), nanoseconds)

    def _count_free(self, found: Found | None) -> None:
        if self._meter is None:
            return
        if found is None:
            self._meter.count_unmatched()
        else:
            self._meter.count_unlimited(found[0])

    def _count_unanswered(self, rule: EnvoyRule, key: str, error: StoreUnavailable) -> None:
        if self._meter is not None:
            self._meter.count_unanswered(rule, key, error)


def _step_now(step: StoreStep) -> list[Decision]:
    """Do what a plan asks for, in this process."""
    if step.what == "peek":
        return [rule.peek_now(key, permits) for rule, key, permits in step.asked]
    if step.what == "each" or len(step.asked) == 1:
        return [rule.take_now(key, permits) for rule, key, permits in step.asked]
    return try_acquire_all([JointCheck(rule.now_limiter, key, permits) for rule, key, permits in step.asked])


class StoreSteps:
    """The steps of one plan, awaited, with *timeout* seconds for all of them."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._deadline = 0.0

    async def answer(self, step: StoreStep) -> list[Decision]:
        """Do what a plan asks for; what is awaited together shares a round trip to Redis."""
        left = self._timeout
        if left is not None:  # the first step has all of it, which is the same in most calls
            left = max(self._deadline - monotonic(), 0.001) if self._deadline else left
            self._deadline = self._deadline or monotonic() + left
        asked = [(rule.limiter_within(left), key, permits) for rule, key, permits in step.asked]
        if step.what == "all":
            return await try_acquire_all_async([JointCheck(*one) for one in asked])
        if step.what == "peek":
            return list(await asyncio.gather(*[limiter.peek(key, permits) for limiter, key, permits in asked]))
        return list(await asyncio.gather(*[limiter.try_acquire(key, permits) for limiter, key, permits in asked]))


UNMATCHED = "envoy/ NONE"  # the rule and algorithm under which descriptors are counted that met no rule


class EnvoyMeter:
    """Counts the decisions of Envoy's rules in one worker, as those of other rules are counted."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._unmatched = self.slot(UNMATCHED) * SLOT_WORDS + ALLOWED

    def slot(self, name: str) -> int:
        """The number of the counters of a rule and algorithm."""
        return self._app.counters.slot(name)

    def record(self, rule: EnvoyRule, key: str, made: Decision, nanoseconds: int | None) -> None:
        responses.record(self._app, rule, key, made, nanoseconds)

    def count_unlimited(self, rule: EnvoyRule) -> None:
        self.record(rule, "", decision(True, MAX_UINT32, MAX_UINT32), None)

    def count_unmatched(self) -> None:
        self._app.slots[self._unmatched] += 1

    def count_unanswered(self, rule: EnvoyRule, key: str, error: StoreUnavailable) -> None:
        """Count and log a call that got no answer, because on_store_error is raise."""
        responses.store_unavailable(self._app, rule, key, error)
