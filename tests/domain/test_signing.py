"""Standard Webhooks 1.0, signed and verified on bytes."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import signing

# The example of the Standard Webhooks specification and its reference libraries.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID, TIMESTAMP, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = b"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def verify(signatures: bytes, body: bytes = BODY, *keys: bytes) -> bool:
    keys = keys or (signing.decode_secret(SECRET),)
    return signing.verify(keys, ID.encode(), b"%d" % TIMESTAMP, signatures, body)


def test_the_published_example_is_signed_and_verified() -> None:
    key = signing.decode_secret(SECRET)
    assert signing.sign(key, ID, TIMESTAMP, BODY).encode() == SIGNATURE
    assert verify(SIGNATURE)


@pytest.mark.parametrize(
    "signatures",
    [
        b"v1,bm90IGl0 " + SIGNATURE,
        SIGNATURE + b" v1a,ed25519-is-skipped v2,later",
        b"v0," + SIGNATURE[3:] + b"  " + SIGNATURE,
    ],
)
def test_any_valid_v1_of_the_list_will_do(signatures: bytes) -> None:
    assert verify(signatures)


@pytest.mark.parametrize(
    "signatures",
    [b"", b" ", b"v1", b"v1,", SIGNATURE[3:], b"v1a," + SIGNATURE[3:], b"V1," + SIGNATURE[3:],
     SIGNATURE + b",", SIGNATURE[:-1], b"\xff\xfe", b"v1,\xff"],
)  # fmt: skip
def test_anything_else_is_refused_and_raises_nothing(signatures: bytes) -> None:
    assert not verify(signatures)


def test_several_secrets_are_valid_during_a_rotation() -> None:
    assert verify(SIGNATURE, BODY, b"another secret of 24 by.", signing.decode_secret(SECRET))
    assert not verify(SIGNATURE, BODY, b"another secret of 24 by.")


@given(st.binary(), st.binary(), st.integers(0, 10**11))
def test_a_signature_is_good_for_its_own_bytes_only(
    body: bytes, other: bytes, timestamp: int
) -> None:
    key = signing.decode_secret(SECRET)
    signature = signing.sign(key, ID, timestamp, body).encode()
    stamped = b"%d" % timestamp
    assert signing.verify([key], ID.encode(), stamped, signature, body)
    assert signing.verify([key], ID.encode(), stamped, signature, other) == (body == other)


@pytest.mark.parametrize(
    ("timestamp", "timely"),
    [
        ("1000000000", True),
        ("999999700", True),
        ("1000000300", True),
        ("999999699", False),
        ("1000000301", False),
        ("", False),
        ("1000000000.0", False),
        ("+1000000000", False),
        (" 1000000000", False),
        ("1000000000\n", False),
        ("１０００００００００", False),
    ],
)
def test_a_timestamp_must_be_whole_seconds_near_now(timestamp: str, timely: bool) -> None:
    now = datetime.fromtimestamp(1_000_000_000, UTC)
    assert signing.timely(timestamp, now) is timely


@given(st.binary(min_size=24, max_size=64))
def test_secrets_survive_being_shown(key: bytes) -> None:
    assert signing.decode_secret(signing.encode_secret(key)) == key


@pytest.mark.parametrize(
    "text", ["", "whsec_", "whsec_!", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_c2hvcnQ="]
)
def test_what_is_no_secret_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="webhook secret"):
        signing.decode_secret(text)
