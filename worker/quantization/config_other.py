"""quantization_config of fp8 and SqueezeLLM."""

from octavo.kernels.weights import Activations
from octavo.worker.models.fields import Fields
from octavo.worker.quantization.config_values import choose_bits, read_names, refuse_unless
from octavo.worker.quantization.fp8 import Float8Scheme
from octavo.worker.quantization.layers import ConfiguredLayers, in_block, listed
from octavo.worker.quantization.scheme import Quantization
from octavo.worker.quantization.squeezellm import SQUEEZELLM_BITS, SqueezeLLMScheme
from octavo.worker.quantization.stored import Tensors

_ACTIVATIONS: dict[str, Activations] = {"dynamic": "dynamic", "static": "static"}


def read_fp8(fields: Fields, tensors: Tensors | None) -> Quantization:
    """Read what AutoFP8, DeepSeek, Qwen and transformers write.

    Raises:
        ModelConfigError: a value is malformed or not supported.
    """
    refuse_unless(fields, "fmt", (None, "e4m3"))
    activations = _ACTIVATIONS[fields.choice("activation_scheme", "dynamic", tuple(_ACTIVATIONS))]
    block = read_block(fields, "weight_block_size")
    if block is not None and activations == "static":
        raise fields.refusal("activation_scheme", "static", "not supported with weight_block_size; dynamic is")
    scale_name = "weight_scale" if block is None else "weight_scale_inv"
    scheme = Float8Scheme(block, activations, scale_name, tensors)
    kept = read_names(fields, "ignored_layers") + read_names(fields, "modules_to_not_convert")

    def leaves_out(prefix: str) -> bool:
        return not in_block(prefix) or listed(prefix, kept)

    return ConfiguredLayers(lambda prefix: scheme, leaves_out, ("weight_scale", "weight_scale_inv"), tensors)


def read_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Read how many outputs and inputs a block of weights has; None: there are no blocks.

    Raises:
        ModelConfigError: it is no pair of positive integers.
    """
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise fields.refusal(name, value, "expected two integers of at least 1")
    return value[0], value[1]


def read_squeezellm(fields: Fields, tensors: Tensors | None) -> Quantization:
    """Read what SqueezeLLM writes; whether there are outliers is seen in the tensors.

    Raises:
        ModelConfigError: a value is malformed or not supported.
    """
    scheme = SqueezeLLMScheme(choose_bits(fields, ("wbits", "bits"), SQUEEZELLM_BITS), tensors)
    return ConfiguredLayers(lambda prefix: scheme, lambda prefix: not in_block(prefix), ("qweight",), tensors)
