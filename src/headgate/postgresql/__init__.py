"""Calls of functions in a PostgreSQL database, from threads and from event loops, through libpq as psycopg wraps it.

schema.py        the tables and functions in the database, as SQL
booking_sql.py   the table and the function of slots
statements.py    the calls of a limiter as statements with parameters, and their answers
bookings.py      the bookings of a limiter as statements
url.py           what a URL says of the server, connections and time-outs
connection.py    one connection: a plan (see `headgate._plan`) that waits for its socket
sync_client.py   PostgresThreads and its connections, for threads
async_client.py  PostgresTasks, for an event loop; calls awaited together become one statement
backend.py       one rule of a limiter, and what errors mean for its calls
"""
