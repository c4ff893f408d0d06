"""Public keys as issuers publish them (JWK Sets, RFC 7517): which are good for what."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

_RSA = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"))
_OF_CURVE = {
    ("EC", "P-256"): frozenset(("ES256",)),
    ("EC", "P-384"): frozenset(("ES384",)),
    ("EC", "P-521"): frozenset(("ES512",)),
    ("OKP", "Ed25519"): frozenset(("EdDSA",)),
    ("OKP", "Ed448"): frozenset(("EdDSA",)),
}
ALGORITHMS = _RSA.union(*_OF_CURVE.values())
"""What a token may be signed with: no secret that is shared, and never nothing."""

_PARTS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
_READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "RSA": RSAAlgorithm.from_jwk,
    "EC": ECAlgorithm.from_jwk,
    "OKP": OKPAlgorithm.from_jwk,
}
_SMALLEST_RSA_BITS = 2048
_LONGEST_PART = 1400  # an RSA modulus of 8192 bits has 1366 characters
_MOST_KEYS = 100

Key = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey | Ed448PublicKey


class NoKeySet(Exception):
    """The document is none."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key, and the algorithms with which it may verify."""

    kid: str | None
    algorithms: frozenset[str]
    key: Key


def read_key_set(document: bytes) -> list[PublicKey]:
    """The usable keys of a JWK Set; others are passed over. Raises NoKeySet."""
    try:
        decoded = json.loads(document)
    except (ValueError, RecursionError):
        raise NoKeySet from None
    listed = decoded.get("keys") if isinstance(decoded, dict) else None
    if not isinstance(listed, list):
        raise NoKeySet
    return list(_usable(listed[:_MOST_KEYS]))


def _usable(listed: list[Any]) -> Iterator[PublicKey]:
    for jwk in listed:
        if not isinstance(jwk, dict):
            continue
        algorithms, kid = _algorithms(jwk), jwk.get("kid")
        key = _key(jwk) if algorithms else None
        if key is not None and (kid is None or isinstance(kid, str)):
            yield PublicKey(kid, algorithms, key)


def _algorithms(jwk: dict[str, Any]) -> frozenset[str]:
    """What a key may verify; nothing if it is for something else, or no secret any more."""
    kty, crv, alg = jwk.get("kty"), jwk.get("crv"), jwk.get("alg")
    operations = jwk.get("key_ops", ["verify"])
    if jwk.get("use", "sig") != "sig" or not isinstance(operations, list):
        return frozenset()
    if "verify" not in operations or "d" in jwk:  # with `d`, whoever reads it can sign
        return frozenset()
    of_kind = _RSA if kty == "RSA" else _OF_CURVE.get((str(kty), str(crv)), frozenset())
    return of_kind if alg is None else of_kind & {str(alg)}


def _key(jwk: dict[str, Any]) -> Key | None:
    kty = jwk["kty"]
    parts = {name: jwk.get(name) for name in _PARTS[kty]}
    if not all(isinstance(part, str) and len(part) <= _LONGEST_PART for part in parts.values()):
        return None
    try:
        key = _READERS[kty]({"kty": kty, **parts})
    except (jwt.PyJWTError, ValueError):
        return None
    if isinstance(key, RSAPublicKey) and key.key_size < _SMALLEST_RSA_BITS:
        return None
    return key if isinstance(key, Key) else None
