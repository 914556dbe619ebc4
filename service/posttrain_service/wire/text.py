"""JSON text as every face sends it: UTF-8, and null where a number is not finite (JSON has no NaN)."""

from __future__ import annotations

import json
import math
from typing import Any


def finite(value: Any) -> Any:
    """The same JSON-like value with NaN and infinities replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """Compact JSON text of `value`; lone surrogates are escaped, so that the text always encodes as UTF-8."""
    text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return text
