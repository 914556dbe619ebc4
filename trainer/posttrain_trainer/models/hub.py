"""Whether the Hugging Face hub has a model: one bounded question before anything is loaded from there.

Its client retries each file for half a minute when nobody answers, and a tokenizer alone asks for half a dozen.
"""

from __future__ import annotations

import functools
import logging

from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from posttrain_trainer.contract.errors import ModelNotFound

_TIMEOUT_S = 8.0
_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=16)
def is_only_cached(name: str) -> bool:
    """Whether the model `owner/name` is to be taken from the hub's cache on this machine alone; False = the hub has it.

    An answer that it is there is remembered for the life of the process.

    Raises:
        ModelNotFound: The hub has no such model for us, or did not answer in some seconds and the cache hasn't it either.
    """
    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    if is_offline_mode():
        if cached:
            return True
        raise ModelNotFound(f"model {name} is no folder here, nor in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to ask the hub")
    where = f"{name} on the hub {constants.ENDPOINT}"
    try:
        HfApi(endpoint=constants.ENDPOINT).model_info(name, timeout=_TIMEOUT_S, expand=["sha"])
        return False
    except GatedRepoError as error:
        refusal = f"model {where} is gated: ask for access there and set HF_TOKEN"
        cause: Exception = error
    except RepositoryNotFoundError as error:
        refusal = f"there is no model {where} (or it is private and HF_TOKEN is missing), and no folder {name} here"
        cause = error
    except Exception as error:  # noqa: BLE001  whichever HTTP client the hub's library uses raises its own
        status = f"it answered {error.response.status_code}" if isinstance(error, HfHubHTTPError) else one_line(error)
        refusal = f"model {name} is no folder here, nor in the cache, and the hub {constants.ENDPOINT} did not give it: {status}"
        cause = error
    if not cached:
        raise ModelNotFound(refusal) from cause
    _log.warning("%s; what the cache has of it is used", refusal.replace(", nor in the cache", ""))
    return True


def one_line(error: BaseException) -> str:
    """An exception's words without line breaks, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
