"""The Redis protocol (`--resp-port`): CL.THROTTLE as redis-cell answers it, and the rules of the service as commands.

connection.py  one connection: commands come in, replies go out in the same order
wire.py        commands from bytes, replies as bytes
commands.py    the table of commands
throttle.py    CL.THROTTLE, with a limiter for each pair of burst and rate
checks.py      HEADGATE.CHECK, HEADGATE.PEEK, HEADGATE.RESET
limit.py       HEADGATE.LIMIT, the calls of limiters in other processes
slots.py       HEADGATE.ACQUIRE, HEADGATE.RENEW, HEADGATE.RELEASE
replies.py     what the commands about rules share
session.py     what a client is and may do, and what it sends when it connects: HELLO, AUTH, CLIENT, INFO, ...
"""
