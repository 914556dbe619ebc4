"""A post-training provider for llama-stack: the whole service, without its HTTP, inside the stack's process.

Jobs run as they do under the service: in process trees of their own, which go on when the stack is killed and are found
again by its next start. Nothing of llama-stack is needed to import this; which of its two generations is there is seen when
the provider is made.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from posttrain_service.adapters.llama_stack.embedded import Embedded
from posttrain_service.settings import Settings


class PosttrainConfig(Settings):
    """Every setting of the service by its name in a stack's configuration; what isn't there comes from POSTTRAIN_*."""

    @classmethod
    def sample_run_config(cls, __distro_dir__: str = "~/.llama/distributions/posttrain", **kwargs: Any) -> dict[str, Any]:
        """What a stack's configuration says of it."""
        return {"storage_dir": f"{__distro_dir__}/posttrain", "trainer_python": "${env.POSTTRAIN_TRAINER_PYTHON:=python3}"}


async def get_provider_impl(config: PosttrainConfig, deps: Mapping[Any, Any]) -> Any:
    """The provider, its loops running. They are threads: the event loop that this is called in may end before the stack serves.

    Args:
        config: From the stack's configuration.
        deps: The stack's own APIs by their name; `datasetio` reads rows.

    Raises:
        InvalidSettings: A folder that can't be used.
        StoreMismatch: The database has another schema.
    """
    rows = next(api for name, api in deps.items() if getattr(name, "value", name) == "datasetio")
    embedded = await asyncio.to_thread(Embedded.begin, config)
    generation = "by_request" if _takes_requests() else "by_keyword"
    module = importlib.import_module(f"{__name__}.{generation}")
    return module.Provider(embedded, rows)


def _takes_requests() -> bool:
    """Whether the installed llama-stack hands its providers request objects (0.5 and later) instead of keywords."""
    return importlib.util.find_spec("llama_stack_api") is not None and hasattr(
        importlib.import_module("llama_stack_api"), "SupervisedFineTuneRequest"
    )
