"""What a limit would have done to real traffic, from a log: `headgate replay`.

logs.py     reads the lines of a log: combined, JSON lines, CSV
traffic.py  the requests of a log, in the order of their time
rules.py    which limit holds for a key: one quota, or a rule of a settings file
decide.py   the decision about every request, and which keys were refused, when, and for how long
suggest.py  the smallest quota under which so many keys would not have been refused
report.py   all figures as one document, as text, and the conditions of --fail-if
picture.py  the same as an SVG or an HTML page
"""
