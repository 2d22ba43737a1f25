"""headgate in web frameworks: one object says what an application limits, with the same arguments in each of them.

asgi.py       any ASGI application, and what the frameworks on ASGI share
wsgi.py       any WSGI application, and what the frameworks on WSGI share (Flask)
flask.py      Flask: views, class-based views and blueprints
quart.py      Quart: the same, and WebSockets
views.py      what Flask and Quart share
login.py      throttling of logins, by address and username
starlette.py  Starlette, and what FastAPI shares with it: limits on routes, WebSockets and their messages
fastapi.py    FastAPI: limits are dependencies or decorators
litestar.py   Litestar: limits are guards
django/       Django, REST framework and django-ninja
aiohttp.py    aiohttp: a middleware, and decorators of handlers and views
sanic.py      Sanic: handlers, views and blueprints
handlers.py   what aiohttp and Sanic share

core.py       RateLimitsBase: one request from its limits to one decision (`admit`), and the 429 (`refusal`)
limit.py      Limit: what is limited, and when
subject.py    whose permits they are: the key of a request
exchange.py   one request, and what its limits have decided
limiters.py   what counts: a limiter for each scope, subject and quota
permits.py    takes the permits of a request from all its limits or from none, waits for them, gives them back
startup.py    arguments checked at the start; warnings: several workers, a proxy that is not trusted
client_ip.py  whose address it is; an IPv6 client is its network
headers.py    X-RateLimit-*, RateLimit and RateLimit-Policy
problem.py    errors as application/problem+json

view_commands.py        `flask headgate`: what is limited, what a client has left
starlette_endpoints.py  decorated endpoints: functions, generators, classes
asgi_hot_path.py        what every request on ASGI passes through, and a route of Starlette: compiled
wsgi_hot_path.py        what every request on WSGI passes through: compiled
hot_fields.py           what those two read at every request: compiled
starlette_routes.py     the limits of one route, and when each is decided
litestar_answers.py     what Litestar answers, on its way to the server
"""
