"""The rules of the tools: one file each, the Lua for Redis and the Python for memory side by side, with the same names.

No I/O and no clock: the time is an argument, in microseconds. Every operation may be run twice with the same arguments,
and the second run changes nothing and answers the same.
"""
