"""Ids that only their owner can use."""

import re
import secrets
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.owners import ANONYMOUS, Owner, OwnerKind, opaque_token_owner
from app.domain.task_ids import Keyring, new_task_ref, peek_ref

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
REF = UUID("01936e1c-7d3a-7cc0-8c5e-2f0f7b1f6a11")
ME, YOU = opaque_token_owner("me"), opaque_token_owner("you")

refs = st.uuids(version=4)
owners = st.builds(
    Owner, st.sampled_from(OwnerKind), st.lists(st.text(max_size=9), max_size=3).map(tuple)
)


def test_an_id_is_64_characters_that_need_no_escaping() -> None:
    ring = Keyring([KEY])
    task_id = ring.mint(REF, ring.fingerprints(ME))
    assert re.fullmatch(r"[A-Za-z0-9_-]{64}", task_id)


@given(st.binary(min_size=32, max_size=32), refs)
def test_no_id_looks_like_an_option_of_a_command(key: bytes, ref: UUID) -> None:
    ring = Keyring([key])
    assert ring.mint(ref, ring.fingerprints(ANONYMOUS))[0].isalnum()


@given(refs, owners)
def test_an_id_gives_its_reference_back_to_its_owner(ref: UUID, owner: Owner) -> None:
    ring = Keyring([KEY])
    fingerprints = ring.fingerprints(owner)
    assert ring.verify(ring.mint(ref, fingerprints), fingerprints) == ref


@given(refs, owners, owners)
def test_an_id_is_worthless_to_anybody_else(ref: UUID, owner: Owner, other: Owner) -> None:
    ring = Keyring([KEY])
    task_id = ring.mint(ref, ring.fingerprints(owner))
    mine = ring.verify(task_id, ring.fingerprints(other)) == ref
    assert mine == (owner == other)


@given(st.integers(0, 63), st.sampled_from("ABCxyz019-_"))
def test_no_character_of_an_id_may_be_changed(position: int, character: str) -> None:
    ring = Keyring([KEY])
    me = ring.fingerprints(ME)
    task_id = ring.mint(REF, me)
    changed = task_id[:position] + character + task_id[position + 1 :]
    assert (ring.verify(changed, me) == REF) == (changed == task_id)


@given(st.text() | st.from_regex(r"[A-Za-z0-9_-]{62,66}\n?", fullmatch=True))
def test_what_was_never_minted_is_nobodys(text: str) -> None:
    ring = Keyring([KEY])
    assert ring.verify(text, ring.fingerprints(ME)) is None
    assert isinstance(peek_ref(text), UUID)


def test_the_same_task_and_owner_always_have_the_same_id() -> None:
    ring = Keyring([KEY])
    me = ring.fingerprints(ME)
    assert ring.mint(REF, me) == ring.mint(REF, me)


def test_a_new_key_mints_and_the_old_one_still_verifies() -> None:
    old = Keyring([KEY])
    old_id = old.mint(REF, old.fingerprints(ME))
    both = Keyring([OTHER_KEY, KEY])
    me = both.fingerprints(ME)

    assert both.verify(old_id, me) == REF
    new_id = both.mint(REF, me)
    assert new_id != old_id
    assert both.mint(REF, me, kid=old.newest_kid) == old_id  # a repeated create gives this one
    assert both.verify(old_id, both.fingerprints(YOU)) is None
    assert old.verify(new_id, old.fingerprints(ME)) is None


def test_two_keys_of_the_same_name_do_not_get_in_each_others_way() -> None:
    twin = next(
        key
        for key in iter(lambda: secrets.token_bytes(32), None)
        if Keyring([key]).newest_kid == Keyring([KEY]).newest_kid
    )
    old = Keyring([KEY])
    both = Keyring([twin, KEY])
    me = both.fingerprints(ME)
    assert both.verify(old.mint(REF, old.fingerprints(ME)), me) == REF
    assert both.verify(both.mint(REF, me), me) == REF


def test_a_backend_can_have_an_id_checked_against_the_stored_owner() -> None:
    ring = Keyring([OTHER_KEY, KEY])
    me = ring.fingerprints(ME)
    task_id = ring.mint(REF, me)
    assert ring.verify_stored(task_id, me[0]) == REF
    assert ring.verify_stored(task_id, ring.fingerprints(YOU)[0]) is None


def test_a_ring_needs_whole_keys() -> None:
    for secrets_ in ([], [b"short"], [KEY, KEY[:31]]):
        with pytest.raises(ValueError, match="key"):
            Keyring(secrets_)


@given(
    st.integers(0, 32_000_000_000_000).map(lambda ms: datetime.fromtimestamp(ms / 1000, UTC)),
    st.binary(min_size=10, max_size=10),
)
def test_a_reference_is_a_uuid_of_version_7(now: datetime, entropy: bytes) -> None:
    ref = new_task_ref(now, entropy)
    assert (ref.version, ref.variant) == (7, "specified in RFC 4122")
    assert ref.int >> 80 == int(now.timestamp() * 1000)


@given(st.lists(owners, min_size=2, max_size=9, unique=True))
def test_different_owners_never_have_the_same_canonical_form(several: list[Owner]) -> None:
    assert len({owner.canonical() for owner in several}) == len(several)


def test_the_canonical_form_does_not_glue_parts_together() -> None:
    glued = Owner(OwnerKind.OPAQUE_TOKEN, ("ab", "c"))
    assert glued.canonical() != Owner(OwnerKind.OPAQUE_TOKEN, ("a", "bc")).canonical()
    assert ANONYMOUS.canonical() != Owner(OwnerKind.ANONYMOUS, ("",)).canonical()
