"""headgate over HTTP: the same limiters for everything that is not Python. `headgate serve` starts it.

server.py                the main process: starts the workers and replaces dead ones
app.py                   one worker: its routes, and what it does once a second
rsgi.py                  what granian hands to a handler, what a handler gives back, and the error that ends a request

listeners.py             TCP ports of a worker beside HTTP
certificates.py          their certificates, from files
resp/                    the Redis protocol

checks.py                check, remaining and reset; a query that was seen before is not parsed again
bookings.py              book: places in time
slots.py                 acquire, renew and release: slots of rules with concurrency
forward.py               answers to proxies that ask before each request
forwarded.py             what a proxy says of that request: parts of a key
paced.py                 waits on a leaky bucket: evenly spaced answers
batch.py                 many checks in one request
request.py               query string and body, parsed strictly
resolve.py               from a request to its rule and key, and what every rule has: parts of its key, counters
rules.py                 rules ready to decide
concurrency_rules.py     rules that limit concurrency: slots on lease
client_limits.py         limits whose rules clients bring along
hybrid_rules.py          the limiters of hybrid rules: kept across reloads, counted, given back
responses.py             from a decision to the counters, and to the response with its headers
model.py                 the JSON of checks and answers
tokens.py                bearer tokens with scopes

envoy_rules.py           Envoy's rate limits: from a call to its answer, and its counters
envoy_tree.py            which rule a descriptor meets
envoy_plan.py            how the descriptors of one call are decided together
envoy_limits.py          the limiters of the rules
envoy_answers.py         from decisions to Envoy's response
envoy_settings.py        [envoy] in the settings, and the types of the YAML
envoy_files.py           the YAML of envoyproxy/ratelimit; errors name the line
envoy_json.py            `POST /json`
grpc.py                  the gRPC listener: sockets, clock and tasks of its connections
grpc_calls.py            the calls of gRPC, their messages and their status
http2/                   HTTP/2 without input and output
rls_messages.py          the messages of Envoy's rate-limit service
protobuf.py              the wire format of protocol buffers

settings.py              the settings: types, and checks that types cannot express
lease_settings.py        hybrid and concurrency in the settings, and what they can be used with
environment.py           settings from the environment and the command line
files.py                 settings from a file, TOML or YAML; errors name the line
reloads.py               settings read again when a file changes

store.py                 the store of a worker, and its connections
health.py                whether the process is alive, should get traffic, and how the store is
redis_figures.py         what Redis says of itself: one server, and each server of a Cluster
doors.py                 the ports that clients come in by, and their connections
metrics.py               metrics as Prometheus text
reports.py               what workers tell each other once a second
rule_minutes.py          what each rule decided in each minute of the last hour
shared_counters.py       the counters of all workers, which metrics and events are made from
logs.py                  one line per event
event_log.py             one line for each outage of a rule, each reset and each change of the rules
busy_keys.py             the busiest keys, and when a rule should be hybrid
openapi.py               the OpenAPI document
openapi_parts.py         the parts that it is made of
pages.py                 the files of the live page, and /docs
page/                    the live page itself
events.py                the live page's server-sent events
live_rules.py            the live page's rules: their last hour, and a rule as TOML
playground.py            the page's limiters to try out
"""

from importlib.util import find_spec

for _name in ("granian", "msgspec"):
    if find_spec(_name) is None:
        raise ImportError(f"the service needs {_name}: pip install 'headgate[service]'")
