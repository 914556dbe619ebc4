"""What a key looks like, what it may do, and what is kept of it."""

import dataclasses

import pytest

from posttrain_service.domain.keys import SCOPES, Caller, key_id, make_key, read_token
from posttrain_service.errors import InvalidRequest


def test_a_key_opens_and_is_not_in_what_is_kept():
    key, text = make_key("ann", "submit", 5.0, label="laptop")
    other, _ = make_key("ann", "submit", 5.0)
    token = read_token(text)
    assert text.startswith(f"{key.prefix}_")
    assert len(text.removeprefix(f"{key.prefix}_")) == 43  # 256 bits
    assert token.opens(key)
    assert not token.opens(other)
    assert not token.opens(dataclasses.replace(key, revoked_at=6.0))
    assert text.removeprefix(f"{key.prefix}_") not in repr(key)
    assert text not in repr(token)


def test_two_keys_never_share_anything():
    made = [make_key("ann", "read", 0.0) for _ in range(50)]
    assert len({key.id for key, _ in made}) == len({text for _, text in made}) == 50


@pytest.mark.parametrize("text", ["", "any", "pt_", "pt_0_x", "sk-" + "a" * 40, "pt_" + "0" * 16 + "_" + "a" * 42, "pt_" + "0" * 16 + "_" + "a" * 43 + "\n", "pt_" + "G" * 16 + "_" + "a" * 43])  # fmt: skip
def test_what_is_no_key_by_its_form(text):
    assert read_token(text) is None


@pytest.mark.parametrize(("scope", "may"), [("read", ["read"]), ("submit", ["read", "submit"]), ("admin", ["read", "submit", "admin"])])
def test_each_scope_holds_those_before_it(scope, may):
    assert [needed for needed in SCOPES if Caller("ann", scope).may(needed)] == may


def test_only_an_admin_sees_everybodys_things():
    assert [Caller("ann", scope).sees for scope in SCOPES] == ["ann", "ann", None]


@pytest.mark.parametrize(
    ("given", "param"),
    [(("", "read"), "owner"), (("a b", "read"), "owner"), (("x" * 65, "read"), "owner"), (("../a", "read"), "owner"), (("ann", "root"), "scope"), (("ann", ""), "scope")],
)  # fmt: skip
def test_owners_and_scopes_that_cannot_be(given, param):
    with pytest.raises(InvalidRequest) as caught:
        make_key(*given, 0.0)
    assert caught.value.param == param
    for label in ("", "x" * 201, "a\nb"):
        with pytest.raises(InvalidRequest):
            make_key("ann", "read", 0.0, label=label)


def test_a_key_is_named_by_its_prefix():
    key, text = make_key("ann", "read", 0.0)
    assert key_id(key.id) == key_id(key.prefix) == key_id(text) == key.id
    with pytest.raises(InvalidRequest) as caught:
        key_id("secret words")
    assert "secret words" not in caught.value.message
