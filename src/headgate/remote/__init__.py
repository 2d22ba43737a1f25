"""A running headgate service as a store: `headgate.stores.service.ServiceStore` puts these parts together.

commands.py  a limiter's rule as text, and its calls as commands of the service
http.py      connections that send them over HTTP
url.py       the store's URL
"""
