"""quantization_config of compressed-tensors: groups of layers, each with the formats of its weights and inputs."""

from collections.abc import Callable

from octavo.kernels.weights import Activations
from octavo.worker.models.fields import Fields
from octavo.worker.quantization.compressed import INTEGER_BITS, IntegerScheme
from octavo.worker.quantization.config_other import read_block
from octavo.worker.quantization.config_values import choose_bits, read_names, refuse_unless
from octavo.worker.quantization.fp8 import Float8Scheme
from octavo.worker.quantization.layers import ConfiguredLayers
from octavo.worker.quantization.patterns import Pattern
from octavo.worker.quantization.scheme import LinearScheme, Quantization
from octavo.worker.quantization.stored import Tensors

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
MIXED = "mixed-precision"
MAX_GROUPS = 256
_INTEGER_STRATEGIES = ("tensor", "channel", "group")
_FLOAT_STRATEGIES = ("tensor", "channel", "block")
_INPUT_TENSORS = ("input_scale", "input_zero_point")


def read_compressed_tensors(fields: Fields, tensors: Tensors | None) -> Quantization:
    """Read what llm-compressor writes.

    Raises:
        ModelConfigError: a value is malformed or not supported.
    """
    refuse_unless(fields, "quantization_status", (None, "compressed"))
    for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        value = fields.raw(name)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise fields.refusal(name, value, "not supported; dense weights, as they are, are")
    overall = fields.choice("format", None, (*FORMATS, MIXED))
    groups = fields.part("config_groups")
    names = fields.raw("config_groups")
    if groups is None or not 0 < len(names) <= MAX_GROUPS:
        raise fields.refusal("config_groups", names, f"expected an object of 1 to {MAX_GROUPS} groups")
    schemes: list[tuple[_Targets, LinearScheme]] = []
    for name in names:
        group = groups.part(name)
        if group is None:
            raise groups.refusal(name, None, "expected an object")
        schemes.append((_Targets(read_names(group, "targets")), _read_group(group, overall, tensors)))
    ignored = _Targets(read_names(fields, "ignore"))

    def scheme_for(prefix: str) -> LinearScheme | None:
        for level in _LEVELS:
            found = next((scheme for targets, scheme in schemes if level(targets, prefix)), None)
            if found is not None:
                return found
        return None

    def leaves_out(prefix: str) -> bool:
        return any(level(ignored, prefix) for level in _LEVELS)

    return ConfiguredLayers(scheme_for, leaves_out, ("weight_packed", "weight_scale"), tensors)


class _Targets:
    """Layers that a list names: by their full name, by a pattern behind `re:`, or by their class."""

    def __init__(self, entries: tuple[str, ...]) -> None:
        self._entries = frozenset(entries)
        self._patterns = [Pattern(entry[3:]) for entry in entries if entry.startswith("re:")]

    def by_name(self, prefix: str) -> bool:
        return prefix in self._entries

    def by_pattern(self, prefix: str) -> bool:
        return any(pattern.matches(prefix) for pattern in self._patterns)

    def by_class(self, prefix: str) -> bool:
        return "Linear" in self._entries


_LEVELS: tuple[Callable[[_Targets, str], bool], ...] = (_Targets.by_name, _Targets.by_pattern, _Targets.by_class)
"""From what is meant most narrowly: it goes first."""


def _read_group(group: Fields, overall: str, tensors: Tensors | None) -> LinearScheme:
    refuse_unless(group, "output_activations", (None,))
    kind = group.choice("format", None if overall == MIXED else overall, FORMATS)
    weights = group.part("weights")
    if weights is None:
        raise group.refusal("weights", None, "not supported; quantised weights are")
    refuse_unless(weights, "dynamic", (None, False))
    numbers = weights.choice("type", "int", ("int", "float"))
    if (numbers == "float") != (kind == "float-quantized") and kind != "naive-quantized":
        raise weights.refusal("type", numbers, f"not supported in format {kind}")
    inputs = group.part("input_activations")
    if numbers == "float":
        return _read_float(weights, inputs, tensors)
    return _read_integer(weights, inputs, kind == "pack-quantized", tensors)


def _read_float(weights: Fields, inputs: Fields | None, tensors: Tensors | None) -> Float8Scheme:
    choose_bits(weights, ("num_bits",), (8,))
    refuse_unless(weights, "symmetric", (None, True))
    strategy = weights.choice("strategy", "tensor", _FLOAT_STRATEGIES)
    block = read_block(weights, "block_structure")
    if (strategy == "block") != (block is not None):
        raise weights.refusal("block_structure", weights.raw("block_structure"), f"contradicts strategy {strategy}")
    return Float8Scheme(block, _read_activations(inputs), "weight_scale", tensors)


def _read_activations(inputs: Fields | None) -> Activations:
    if inputs is None:
        return "none"
    refuse_unless(inputs, "type", ("float",))
    choose_bits(inputs, ("num_bits",), (8,))
    refuse_unless(inputs, "symmetric", (None, True))
    if inputs.flag("dynamic", False):
        return "dynamic"
    inputs.choice("strategy", "tensor", ("tensor",))
    return "static"


def _read_integer(weights: Fields, inputs: Fields | None, packed: bool, tensors: Tensors | None) -> IntegerScheme:
    size = weights.raw("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", inferred, _INTEGER_STRATEGIES)
    order = weights.raw("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise weights.refusal("actorder", order, "not supported; supported are group, weight")
    return IntegerScheme(
        bits=choose_bits(weights, ("num_bits",), INTEGER_BITS),
        packed=packed,
        strategy=strategy,
        group_size=weights.count("group_size") if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        ordered=order in (True, "group", "dynamic"),
        input_tensors=() if inputs is None else _INPUT_TENSORS,
        tensors=tensors,
    )
