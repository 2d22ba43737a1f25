"""headgate over HTTP: the same limiters for everything that is not Python. `headgate serve` starts it.

server.py           the main process: starts the workers and replaces dead ones
app.py              one worker: its routes, and what it does once a second
rsgi.py             what granian hands to a handler, and what a handler gives back

checks.py           check, remaining and reset
batch.py            many checks in one request
request.py          query string and body, parsed strictly
resolve.py          from a request to its rule and key
client_ip.py        the client's IP address
rules.py            rules ready to decide
responses.py        from a decision to the counters and to the response
headers.py          RateLimit and RateLimit-Policy
problem.py          errors as application/problem+json
model.py            the JSON of checks and answers
tokens.py           bearer tokens with scopes

settings.py         the settings: types, and checks that types cannot express
environment.py      settings from the environment and the command line
files.py            settings from a file; errors name the line

health.py           whether the process is alive, should get traffic, and how the store is
metrics.py          metrics as Prometheus text
shared_counters.py  the counters of all workers, which metrics and events are made from
logs.py             one line per event
openapi.py          the OpenAPI document
pages.py            the files of the live page, and /docs
page/               the live page itself
events.py           the live page's server-sent events
playground.py       the page's limiters to try out
"""

from importlib.util import find_spec

for _name in ("granian", "msgspec"):
    if find_spec(_name) is None:
        raise ImportError(f"the service needs {_name}: pip install 'headgate[service]'")
