"""The store ``shared://``: files that all processes of one machine map.

layout.py   what is where in a file, and the check that a file is one
files.py    where files are, how one is made, why one is refused
_table.c    the table of a file: find, compare and swap, commit; compiled where there is a compiler
locked.py   the same in plain Python, under byte-range locks of the kernel
states.py   states of the algorithms as words and cells
columns.py  the times and totals of a log in a file
tables.py   the files that this process has open
backend.py  one rule on a file: read, decide, store if nothing has changed
store.py    SharedStore
"""

from headgate.stores.shared.store import SharedStore as SharedStore
