"""Headers that a client may send to pass for another one."""

from collections.abc import Mapping

FORGED: list[Mapping[str, str]] = [
    {"X-Forwarded-For": "1.2.3.4"},
    {"x-forwarded-for": "1.2.3.4, 127.0.0.1"},
    {"X-FORWARDED-FOR": "127.0.0.1, 1.2.3.4"},
    {"X-Forwarded-For": "unknown"},
    {"X-Forwarded-For": ""},
    {"X-Forwarded-For": "a" * 5000},
    {"X-Forwarded-For": ", ".join(["1.2.3.4"] * 500)},
    {"X-Forwarded-For": "::ffff:1.2.3.4"},
    {"X-Forwarded-For": "[::1]:80"},
    {"X-Forwarded-For": '"1.2.3.4"'},
    {"X_Forwarded_For": "1.2.3.4"},
    {"X-Real-IP": "1.2.3.4"},
    {"X_Real_IP": "1.2.3.4"},
    {"X-Real-IP": "1.2.3.4", "X-Forwarded-For": "5.6.7.8"},
    {"Forwarded": "for=1.2.3.4"},
    {"Forwarded": 'for="[2001:db8::1]"'},
    {"X-Client-IP": "1.2.3.4"},
    {"X-Cluster-Client-IP": "1.2.3.4"},
    {"CF-Connecting-IP": "1.2.3.4"},
    {"True-Client-IP": "1.2.3.4"},
    {"Via": "1.1 1.2.3.4"},
]
