"""Keys that the broker hands out, and how it keeps what it must be able to read again."""

import hmac
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

BACKEND_KEY_PREFIX = "tbk_"
CLIENT_KEY_PREFIX = "tbc_"


def new_backend_key() -> str:
    return BACKEND_KEY_PREFIX + secrets.token_urlsafe(32)


def new_client_key() -> str:
    return CLIENT_KEY_PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> bytes:
    """What is stored of a key. A plain hash will do: the keys are random, not chosen."""
    return sha256(key.encode()).digest()


class Undecryptable(Exception):
    """No key of the ring opens this; the one that closed it is missing from SECRET_KEYS."""


def fernet(keys: Sequence[bytes], purpose: bytes) -> MultiFernet:
    """Encryption for one purpose: under the newest server key, readable with any of them."""
    derived = [hmac.digest(key, b"taskbroker/v1/" + purpose, sha256) for key in keys]
    return MultiFernet([Fernet(urlsafe_b64encode(key)) for key in derived])


class SecretBox:
    """Keeps secrets encrypted under the newest server key; opens what any of the keys closed."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._fernet = fernet(keys, b"secret-box")

    def close(self, secret: bytes) -> bytes:
        return self._fernet.encrypt(secret)

    def open(self, ciphertext: bytes) -> bytes:
        """The secret. Raises Undecryptable."""
        try:
            return self._fernet.decrypt(ciphertext)
        except InvalidToken:
            raise Undecryptable from None

    def opens(self, ciphertext: bytes) -> bool:
        try:
            self.open(ciphertext)
        except Undecryptable:
            return False
        return True
