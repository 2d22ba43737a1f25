"""Logins of a Flask application: failures are held by address and by username, and a success forgets its own.

Needs `pip install 'headgate[flask]'`. Serve it with `flask --app web_login_flask run`; as a program it makes some
requests to itself and prints the answers.
"""

import hashlib
import hmac

from flask import Flask, Response, request

from headgate.web.login import LoginRefused, LoginThrottle

app = Flask(__name__)
throttle = LoginThrottle(
    per_username="3/15 minutes", per_address="20/hour"
)  # store="redis://...", trusted_proxies=[...]


def hashed(password: str) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", password.encode(), b"a salt for each user", 1000)


USERS = {"ann": hashed("correct horse"), "bob": hashed("battery staple")}


def is_right(username: str, password: str) -> bool:
    """As much work for a username that does not exist: the time of an answer must not tell."""
    return hmac.compare_digest(hashed(password), USERS.get(username, bytes(32)))


@app.errorhandler(LoginRefused)
def too_many(error: LoginRefused) -> Response:
    status, headers, body = error.answer()
    return Response(body, status, headers)


@app.post("/login")
def login() -> tuple[str, int]:
    username, password = request.form["username"], request.form["password"]
    with throttle.attempt(request, username) as attempt:
        if is_right(username, password):
            attempt.succeeded()
            return f"welcome, {username}", 200
        return "wrong username or password", 401


def main() -> None:
    client = app.test_client()

    def tries(username: str, *passwords: str, address: str = "192.0.2.7") -> list[int]:
        sent = [{"username": username, "password": password} for password in passwords]
        answers = [client.post("/login", data=data, environ_base={"REMOTE_ADDR": address}) for data in sent]
        return [answer.status_code for answer in answers]

    print("typing errors are forgotten:", tries("ann", "correct horse", "oops", "oops", "correct horse", "oops"))
    print("guesses are held:", tries("ANN", "a", "b", "c", "d", address="198.51.100.66"))
    print("ann still gets in where she was before:", tries("ann", "correct horse"))
    print("names that do not exist look the same:", tries("eve", "a", "b", "c", "d"))


if __name__ == "__main__":
    main()
