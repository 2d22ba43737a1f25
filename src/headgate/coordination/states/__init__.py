"""The state machines of lock, semaphore, circuit breaker, pool and queue: one file each, with its Lua and its Python.

Redis runs the Lua, memory runs the Python; both have the same operations under the same names and give the same
replies. There is no I/O and no clock here: the time is an argument, in microseconds. Every operation may be run twice
with the same arguments: the second run changes nothing and gives the same reply.

machine.py         what a state machine is
lock.py            the holder of a lock, and its fence
semaphore.py       the leases of a semaphore
breaker.py         the counts and the probes of a circuit breaker
pool.py            the members, leases and waiting callers of a pool
member.py          one member of a pool
queue.py           the entries of a queue
"""
