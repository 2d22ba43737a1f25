"""The certificates of the listeners beside HTTP, from the files of [tls]; an error names its file."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Sequence
from pathlib import Path

from headgate.service.settings import BadFile, TLSSettings


def server_context(tls: TLSSettings, alpn: Sequence[str] = ()) -> ssl.SSLContext:
    """The context of a listener, TLS 1.2 and newer; *alpn* are the protocols that it speaks. Raises `BadFile`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, tls)
    if tls.client_ca:
        _read("client_ca", tls.client_ca)
        try:
            context.load_verify_locations(tls.client_ca)
        except ssl.SSLError as error:
            raise BadFile(f"tls.client_ca: {tls.client_ca!r} has no certificate as PEM: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def certificates_in(tls: TLSSettings) -> bytes:
    """A digest of the files of *tls*. Raises `BadFile`."""
    digest = hashlib.sha256()
    for name in ("cert", "key", "client_ca"):
        if file := getattr(tls, name):
            digest.update(hashlib.sha256(_read(name, file)).digest())
    return digest.digest()


def load_certificate(context: ssl.SSLContext, tls: TLSSettings) -> None:
    """Read certificate and key into *context*. Raises `BadFile`."""
    _read("cert", tls.cert)
    _read("key", tls.key)
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadFile(f"tls: the key {tls.key!r} does not belong to the certificate {tls.cert!r}") from None
        why = f"{tls.cert!r} and {tls.key!r} must hold a certificate and its key as PEM: {error}"
        raise BadFile(f"tls: {why}") from None
    except EncryptedKey:
        raise BadFile(f"tls.key: {tls.key!r} is encrypted; give the key without a passphrase") from None


def check_tls(tls: TLSSettings | None) -> None:
    """Raise `BadFile` if certificates are named that cannot be used."""
    if tls is not None:
        server_context(tls)


class EncryptedKey(Exception):
    """The private key needs a passphrase, for which OpenSSL would ask at the terminal."""


def _refuse_passphrase() -> str:
    raise EncryptedKey


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise BadFile(f"tls.{name}: cannot read {file!r}: {error.strerror}") from None
