"""What llama-stack asks a module that its configuration names."""

from __future__ import annotations

import importlib
from typing import Any

PROVIDER_TYPE = "inline::huggingface-ilab"
MODULE = "posttrain_service.adapters.llama_stack"


def get_provider_spec() -> Any:
    """The provider's InlineProviderSpec, in the words of the llama-stack that is installed."""
    types = _types()
    return types.InlineProviderSpec(
        api=types.Api.post_training,
        provider_type=PROVIDER_TYPE,
        module=MODULE,
        config_class=f"{MODULE}.PosttrainConfig",
        api_dependencies=[types.Api.datasetio, types.Api.datasets],
        pip_packages=["posttrain"],
    )


def _types() -> Any:
    try:
        return importlib.import_module("llama_stack_api")
    except ImportError:  # before 0.4
        return importlib.import_module("llama_stack.providers.datatypes")
