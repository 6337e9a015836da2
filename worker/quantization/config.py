"""What config.json says of the formats of the linear layers' weights."""

from collections.abc import Callable
from typing import Any

from octavo.worker.models.fields import Fields
from octavo.worker.quantization import config_auto_round, config_compressed, config_grouped, config_other
from octavo.worker.quantization.fp8 import quantized_float8
from octavo.worker.quantization.int8 import quantized_int8
from octavo.worker.quantization.layers import QuantizedOnLoad
from octavo.worker.quantization.methods import method_of
from octavo.worker.quantization.plain import Unquantized
from octavo.worker.quantization.scheme import Quantization
from octavo.worker.quantization.stored import Tensors

# Each has an entry for every one of octavo.worker.quantization.methods.
_READERS: dict[str, Callable[[Fields, Tensors | None], Quantization]] = {
    "auto-round": config_auto_round.read_auto_round,
    "awq": config_grouped.read_awq,
    "compressed-tensors": config_compressed.read_compressed_tensors,
    "fp8": config_other.read_fp8,
    "gptq": config_grouped.read_gptq,
    "squeezellm": config_other.read_squeezellm,
}
_ON_LOAD: dict[str, Callable[[], Quantization]] = {
    "fp8": lambda: QuantizedOnLoad(quantized_float8),
    "int8": lambda: QuantizedOnLoad(quantized_int8, with_head=True),
}


def read_quantization(config: Any, chosen: str | None = None, tensors: Tensors | None = None) -> Quantization:
    """Read how the linear layers are stored.

    Args:
        config: quantization_config of config.json, or what a file beside it holds; None: there is none.
        chosen: --quantization; None: as the config says.
        tensors: of the checkpoint; None where there is none (random weights): then it is as tools write it.

    Raises:
        ModelConfigError: it is malformed or not supported, or contradicts what was chosen.
    """
    method = method_of(config, chosen)
    if method is None:
        return Unquantized()
    if config is None:
        return _ON_LOAD[method]()
    return _READERS[method](Fields(config, "quantization_config."), tensors)
