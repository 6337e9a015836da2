"""What config.json says of the formats of the linear layers' weights."""

from typing import Any

from octavo.worker.quantization.methods import method_of
from octavo.worker.quantization.plain import Unquantized
from octavo.worker.quantization.scheme import Quantization


def read_quantization(config: Any) -> Quantization:
    """Read the quantization_config of config.json; None where there is none.

    Raises:
        ModelConfigError: it is malformed or not supported.
    """
    method_of(config)
    return Unquantized()
