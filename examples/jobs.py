"""Jobs that run later, in order and at the pace of a limit: each has a slot, and asks once more when it has come.

The queue here is a heap; Celery, Dramatiq, taskiq and arq have adapters in headgate.jobs.
"""

import heapq
import time

from headgate import Limiter
from headgate.jobs import JobSlots

limiter = Limiter("50/second burst 5")  # with store="redis://..." all workers share the pace
mails = JobSlots(limiter, key=lambda address: address.partition("@")[2])  # a limit for each domain

begun = time.monotonic()
queue = [(begun, number, f"user{number}@example.com") for number in range(30)]
sent, deliveries = [], 0
while queue:
    due, number, address = heapq.heappop(queue)
    time.sleep(max(due - time.monotonic(), 0))
    deliveries += 1
    delay = mails.delay(f"job-{number}", (address,))
    if delay:
        heapq.heappush(queue, (time.monotonic() + delay, number, address))
    else:
        sent.append(number)

print(f"{len(sent)} mails in {time.monotonic() - begun:.2f} s, {deliveries - len(sent)} reschedules")
assert sent == sorted(sent)
