"""Owners and their canonical form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.owners import Owner, OwnerKind

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
