"""Which methods of quantisation there are. Imports no torch: the command line asks before any process starts."""

import json
from pathlib import Path
from typing import Any

from octavo.wire.model_files import read_model_text
from octavo.worker.errors import ModelConfigError

SUPPORTED_METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "squeezellm")
"""Values of quantization_config.quant_method, and of --quantization for such checkpoints."""
ON_LOAD_METHODS = ("fp8", "int8")
"""Values of --quantization for plain checkpoints, which are quantised as they are loaded."""
SIDE_FILES = ("quantize_config.json", "quant_config.json")
"""Where older tools wrote what is now quantization_config in config.json."""
MAX_SIDE_FILE_BYTES = 2**20


def method_of(config: Any, chosen: str | None = None) -> str | None:
    """Return the method of a quantization_config; None where there is none, and none is chosen.

    Args:
        config: quantization_config of config.json, or what a file beside it holds; None: there is none.
        chosen: --quantization; None: as the config says.

    Raises:
        ModelConfigError: it is malformed or not supported, or contradicts what was chosen.
    """
    if chosen is not None and chosen not in SUPPORTED_METHODS and chosen not in ON_LOAD_METHODS:
        names = ", ".join(sorted({*SUPPORTED_METHODS, *ON_LOAD_METHODS}))
        raise ModelConfigError(f"--quantization {chosen!r} is not supported; supported are {names}")
    if config is None:
        if chosen is not None and chosen not in ON_LOAD_METHODS:
            raise ModelConfigError(
                f"--quantization {chosen}: the model folder says nothing of it, neither in quantization_config of "
                f"config.json nor in {' or '.join(SIDE_FILES)}; plain weights become {', '.join(ON_LOAD_METHODS)} on load"
            )
        return chosen
    method = _named(config) if isinstance(config, dict) else config
    if not isinstance(method, str) or method not in SUPPORTED_METHODS:
        raise ModelConfigError(
            f"quantization_config: method {method!r} is not supported; supported are {', '.join(SUPPORTED_METHODS)}"
        )
    if not isinstance(config, dict):
        raise ModelConfigError(f"quantization_config = {config!r}: expected an object")
    if chosen is not None and chosen != method:
        raise ModelConfigError(
            f"--quantization {chosen} contradicts the quantization_config of the model: it is {method}"
        )
    return method


def method_in_words(config: Any) -> str:
    """Say for people how a checkpoint is quantised: gptq, 4 bits, groups of 128, desc_act.

    Raises:
        ModelConfigError: as of `method_of`.
    """
    words = [method_of(config) or "none"]
    values = config if isinstance(config, dict) else {}
    for name in ("bits", "w_bit", "wbits"):
        if isinstance(values.get(name), int):
            words.append(f"{values[name]} bits")
    for name in ("group_size", "q_group_size"):
        if isinstance(size := values.get(name), int):
            words.append(f"groups of {size}" if size > 0 else "one group")
    words += [str(values[name]) for name in ("format", "packing_format") if name in values]
    words += ["desc_act"] if values.get("desc_act") is True else []
    return ", ".join(words)


def _named(config: dict[str, Any]) -> Any:
    """Return the method's name; older files hold none, but keys of their own."""
    method = config.get("quant_method")
    if method is None and "wbits" in config:
        return "squeezellm"
    if method is None and ("w_bit" in config or "q_group_size" in config or "zero_point" in config):
        return "awq"
    if method is None and "bits" in config and "group_size" in config:
        return "gptq"
    return method


def file_of(folder: Path) -> Path:
    """Return what to name in errors about how a folder's weights are quantised: a file, or the folder where it may be two."""
    return folder if any((folder / name).exists() for name in SIDE_FILES) else folder / "config.json"


def config_beside(folder: Path) -> dict[str, Any] | None:
    """Read what older tools wrote beside config.json, if they did.

    Raises:
        ModelConfigError: a file is malformed.
    """
    for path in (folder / name for name in SIDE_FILES):
        try:
            size = path.stat().st_size
            if size > MAX_SIDE_FILE_BYTES:
                raise ModelConfigError(f"{path} has {size} bytes, limit {MAX_SIDE_FILE_BYTES}")
            values = json.loads(read_model_text(path))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise ModelConfigError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ModelConfigError(f"{path} holds no JSON object")
        return values
    return None
