"""API keys as values: what one looks like, what it may do, and whose things its bearer sees. Pure.

A key is `pt_<id>_<secret>`. The id is public: it finds the row and is what lists show. The secret is 256 random bits, and
only its SHA-256 is kept. A slow hash would add nothing here: it protects passwords because people choose them out of few,
and nobody can try 2^256 secrets, however fast the hash. A fast one is checked on every request, so that a key which was
revoked is refused at once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from posttrain_service.errors import InvalidRequest

Scope = Literal["read", "submit", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Each may do what those before it may: look; also make and change; also see and change everybody's."""
DEFAULT_OWNER = "default"
"""Owner of what was made without keys."""

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_TOKEN = re.compile(r"pt_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_MAX_LABEL = 200


@dataclass(frozen=True)
class ApiKey:
    """A key as it is kept."""

    id: str
    """16 hex digits, public."""
    owner: str
    """Whose things its bearer makes and sees."""
    scope: Scope
    """What its bearer may do."""
    digest: str
    """SHA-256 of the secret, in hex."""
    created_at: float
    """When it was made."""
    label: str | None = None
    """What it is for, for people."""
    revoked_at: float | None = None
    """Since when it is refused; None = it is good."""

    @property
    def prefix(self) -> str:
        """The part that may be shown."""
        return f"pt_{self.id}"


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    owner: str
    scope: Scope

    @property
    def sees(self) -> str | None:
        """The owner whose things there are for this caller; None = everybody's."""
        return None if self.scope == "admin" else self.owner

    def may(self, needed: Scope) -> bool:
        """Whether the scope reaches that far."""
        return SCOPES.index(self.scope) >= SCOPES.index(needed)


@dataclass(frozen=True)
class Token:
    """A key as its bearer sends it."""

    id: str
    digest: str
    """SHA-256 of the secret that came with it."""

    def opens(self, key: ApiKey) -> bool:
        """Whether this is the key; takes the same time wherever the two differ."""
        return hmac.compare_digest(self.digest, key.digest) and key.revoked_at is None


def make_key(
    owner: str, scope: str, now: float, *, label: str | None = None, random: Callable[[int], bytes] = secrets.token_bytes
) -> tuple[ApiKey, str]:
    """A new key, and its text: the only time that the secret is there to be seen.

    Args:
        owner: Letters, digits and `.`, `_`, `@`, `-`; at most 64.
        scope: One of SCOPES.
        now: UTC epoch seconds.
        label: What it is for.
        random: So many random bytes, for tests.

    Raises:
        InvalidRequest: An owner, scope or label that can't be.
    """
    if not _OWNER.fullmatch(owner):
        raise InvalidRequest(f"owner {owner[:80]!r}: use 1 to 64 letters, digits and . _ @ -, a letter or digit first", param="owner")
    if scope not in SCOPES:
        raise InvalidRequest(f"scope {scope[:80]!r} is none of {', '.join(SCOPES)}", param="scope")
    if label is not None and not (0 < len(label) <= _MAX_LABEL and label.isprintable()):
        raise InvalidRequest(f"the label must have 1 to {_MAX_LABEL} printable characters", param="label")
    secret = _text(random(32))
    key = ApiKey(random(8).hex(), owner, SCOPES[SCOPES.index(scope)], _digest(secret), now, label)
    return key, f"{key.prefix}_{secret}"


def read_token(text: str) -> Token | None:
    """The key that a client sent; None when it isn't one of ours by its form."""
    match = _TOKEN.fullmatch(text)
    return None if match is None else Token(match[1], _digest(match[2]))


def key_id(text: str) -> str:
    """The id in what a person gives to name a key: its prefix, with or without `pt_`, or the key itself.

    Raises:
        InvalidRequest: It is none of these.
    """
    match = re.match(r"(?:pt_)?([0-9a-f]{16})(?:_|$)", text)
    if match is None:
        raise InvalidRequest("name a key by its prefix, pt_ and 16 hex digits, as `posttrain keys list` shows it", param="key")
    return match[1]


def _text(secret: bytes) -> str:
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode("ascii")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("ascii")).hexdigest()
