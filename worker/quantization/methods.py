"""Which methods of quantisation there are. Imports no torch: the command line asks before any process starts."""

from typing import Any

from octavo.worker.errors import ModelConfigError

SUPPORTED_METHODS: tuple[str, ...] = ()
"""Values of quantization_config.quant_method."""


def method_of(config: Any) -> str | None:
    """Return the method of a quantization_config; None where there is none.

    Raises:
        ModelConfigError: it is malformed or not supported.
    """
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    if method not in SUPPORTED_METHODS:
        supported = (
            f"supported are {', '.join(SUPPORTED_METHODS)}" if SUPPORTED_METHODS else "only unquantised weights are"
        )
        raise ModelConfigError(f"quantization_config: method {method!r} is not supported; {supported}")
    return str(method)
