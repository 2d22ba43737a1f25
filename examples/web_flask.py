"""Flask: a default for all views, a tighter limit for a search, a limit for failed logins only, and costs.

Needs `pip install 'headgate[flask]'`. Serve it with `flask --app web_flask run`; as a program it makes some requests to
itself and prints the answers.
"""

from typing import Any

from flask import Blueprint, Flask, g, request

from headgate.web.flask import RateLimits

app = Flask(__name__)
limits = RateLimits(app, default="100/minute")  # store="redis://..." for more than one process
api = limits.limit("50/minute", scope="api")(Blueprint("api", __name__, url_prefix="/api"))
graphql = limits.limit("100/minute", scope="graphql")


@app.route("/search")
@limits.limit(["2/second", "5/minute"])
def search() -> str:
    return f"{g.rate_limit.remaining} left"


@app.post("/login")
@limits.limit("3/minute", count_if=lambda response: response.status_code == 401)
def login() -> tuple[str, int]:
    right = request.get_json()["password"] == "secret"
    return ("welcome", 200) if right else ("wrong password", 401)


@api.post("/graphql")
def query() -> dict[str, Any]:
    cost = 10 * request.get_data(as_text=True).count("{")
    return {"data": {}, "left": graphql.check(cost=cost).remaining}


app.register_blueprint(api)


def main() -> None:
    client = app.test_client()
    for _ in range(3):
        answer = client.get("/search")
        print("search:", answer.status_code, answer.text)
    for password in ["secret", "a", "secret", "b", "c", "secret"]:
        print("login:", client.post("/login", json={"password": password}).status_code)
    for asked in ["{ user }", "{ users { friends { friends { name } } } }", "{" * 9]:
        answer = client.post("/api/graphql", data=asked)
        print("graphql:", answer.status_code, answer.get_json())
    answer = client.get("/nothing")
    print("nothing:", answer.status_code, answer.headers["X-RateLimit-Remaining"], "of the default left")


if __name__ == "__main__":
    main()
