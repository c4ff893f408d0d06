"""Owners and their canonical form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.owners import Owner, OwnerKind, oauth_owner

owners = st.builds(
    Owner, st.sampled_from(OwnerKind), st.lists(st.text(st.characters(codec="utf-8"))).map(tuple)
)


@given(owners)
def test_a_canonical_form_is_read_back(owner: Owner) -> None:
    assert Owner.from_canonical(owner.canonical()) == owner


@given(owners, owners)
def test_different_owners_have_different_forms(one: Owner, other: Owner) -> None:
    assert (one.canonical() == other.canonical()) == (one == other)


@given(st.binary(max_size=30))
def test_what_is_no_form_is_refused(form: bytes) -> None:
    try:
        owner = Owner.from_canonical(form)
    except ValueError:
        return
    assert owner.canonical() == form


@pytest.mark.parametrize("form", [b"", b"\0\0\0\x05anon"])
def test_a_cut_form_is_refused(form: bytes) -> None:
    with pytest.raises(ValueError, match=r"empty|cut off"):
        Owner.from_canonical(form)


_names = st.text(st.characters(codec="utf-8"), max_size=8)
_of_issuers = st.tuples(_names, _names, st.none() | _names)


@given(_of_issuers, _of_issuers)
def test_owners_of_issuers_differ_when_any_part_does(
    one: tuple[str, str, str | None], other: tuple[str, str, str | None]
) -> None:
    forms = oauth_owner(*one).canonical(), oauth_owner(*other).canonical()
    assert (forms[0] == forms[1]) == (one == other)


@given(_names, _names)
def test_no_client_id_is_not_an_empty_one(issuer: str, subject: str) -> None:
    without, empty = oauth_owner(issuer, subject, None), oauth_owner(issuer, subject, "")
    assert without.canonical() != empty.canonical()
    assert Owner.from_canonical(without.canonical()) == without
    assert Owner.from_canonical(empty.canonical()) == empty
