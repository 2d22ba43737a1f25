"""Tools for operators: what new settings change, whether a store is fit for limits, and what a service does now.

plan.py               headgate plan: the rules of two settings files, compared
doctor.py             headgate doctor: what can be tried at a store, and what it says of itself
finding.py            one thing that the doctor looked at, and what servers of any kind share
redis_server.py       what a Redis server and its Sentinels say of themselves
postgresql_server.py  what a PostgreSQL server says of itself and of headgate's tables
shared_directory.py   what a limiter would find in the directory of a shared store
top.py                headgate top: the rules of a running service and their rates
"""
