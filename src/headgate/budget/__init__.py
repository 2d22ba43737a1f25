"""Budgets: amounts that are reserved before a call, and settled when its cost is known. See docs/budgets.md.

budget.py        Budget and AsyncBudget
holds.py         Hold and AsyncHold, and the short way of most calls to Redis
hold_plans.py    what a hold does, from its request until it is settled
server_calls.py  the requests to Redis, packed once but for what changes
subjects.py      what a key means, and the short way to its state in memory
amounts.py       counts and money, and what their quotas mean in whole units
state.py         what is done to the state of a budget, in Python; ends the holds of callers that died
script.py        the same in Lua, for Redis
short_script.py  how the Lua reads the state, and its short way for most calls
records.py       the buckets, holds and waiters of a state in memory
"""

from headgate.budget.budget import AsyncBudget, Budget, UnsettledHold
from headgate.budget.holds import AsyncHold, Hold

__all__ = ["AsyncBudget", "AsyncHold", "Budget", "Hold", "UnsettledHold"]
