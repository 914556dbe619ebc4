"""Keys: who a caller is. The store is asked each time, so a key that was made or revoked anywhere counts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain_service.domain.keys import Caller, read_token
from posttrain_service.errors import Unauthorized
from posttrain_service.store.store import Store

if TYPE_CHECKING:
    from posttrain_service.work.services import Services


@dataclass(frozen=True)
class Access:
    """Who a caller is, and what there is for them."""

    store: Store
    always: bool
    """A key is needed even when there is none: other machines reach this server."""
    view: Callable[[Caller], Services]
    """Makes the use cases for a caller."""

    def caller(self, sent: str | None) -> Caller | None:
        """Whose key this is; None = this server has no keys and needs none, whatever was sent.

        Raises:
            Unauthorized: A key is needed, and this is none or a revoked one.
        """
        token = None if sent is None else read_token(sent)
        key = None if token is None else self.store.keys.get(token.id)
        if token is not None and key is not None and token.opens(key):
            return Caller(key.owner, key.scope)
        if key is None and not self.always and not self.store.keys.any():
            return None
        if sent is None:
            raise Unauthorized(
                "this server needs an API key: send it as Authorization: Bearer KEY; whoever runs the server makes one by "
                "`posttrain keys create`",
                code="missing_api_key",
            )
        raise Unauthorized(
            "the API key is not valid here: it is mistyped, of another server, or was revoked", code="invalid_api_key"
        )

    def services(self, caller: Caller) -> Services:
        """The use cases as they are for one caller: what isn't theirs is not there."""
        return self.view(caller)
