"""A budget of tokens and money: reserve before a call, settle when its cost is known."""

import random
from concurrent.futures import ThreadPoolExecutor

from headgate import Budget, BudgetExceeded, RateLimited

llm = Budget(requests="100/minute", tokens="20000/minute", usd="0.50/day")  # add store="redis://..." to share it


def ask(number: int) -> str:
    """Make a call that costs 200 to 900 tokens, which we do not know before."""
    try:
        with llm.reserve("tenant:7", requests=1, tokens=900, usd="0.018", timeout=0) as hold:
            tokens = random.Random(number).randrange(200, 900)  # what the answer says
            hold.settle(tokens=tokens, usd=f"{tokens * 20 / 1_000_000:.6f}")
            return f"call {number}: {tokens} tokens"
    except RateLimited as refused:
        return f"call {number}: {refused}"


with ThreadPoolExecutor(8) as threads:
    print(*threads.map(ask, range(10)), sep="\n")
print("left:", llm.remaining("tenant:7"))

hold = llm.reserve("tenant:8", requests=1, tokens=500)
try:
    with hold:
        while True:
            hold.spend(tokens=400)  # a stream that does not end by itself
except BudgetExceeded as stop:
    print(stop, "after", hold.spent["tokens"])
