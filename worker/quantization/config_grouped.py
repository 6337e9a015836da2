"""quantization_config of GPTQ and AWQ."""

from typing import Any

from octavo.worker.models.fields import Fields
from octavo.worker.quantization.awq import AWQ_BITS, AWQScheme
from octavo.worker.quantization.config_values import choose_bits, read_group_size, read_names, refuse_unless
from octavo.worker.quantization.gptq import GPTQ_BITS, GPTQScheme
from octavo.worker.quantization.layers import ConfiguredLayers, in_block
from octavo.worker.quantization.patterns import Pattern
from octavo.worker.quantization.scheme import Quantization
from octavo.worker.quantization.stored import Tensors

MAX_RULES = 4096
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_AWQ_LAYOUTS = ("gemm", "gemv")


def read_gptq(fields: Fields, tensors: Tensors | None) -> Quantization:
    """Read what AutoGPTQ, GPTQModel and others wrote.

    Raises:
        ModelConfigError: a value is malformed or not supported.
    """
    refuse_unless(fields, "is_marlin_format", (None, False))
    refuse_unless(fields, "pack_dtype", (None, "int32"))
    refuse_unless(fields, "rotation", (None,))
    refuse_unless(fields, "planar", (None, False))
    version = fields.choice("checkpoint_format", fields.raw("format") or "gptq", tuple(_ZERO_OFFSETS))
    base = GPTQScheme(
        bits=choose_bits(fields, ("bits",), GPTQ_BITS),
        group_size=read_group_size(fields, "group_size"),
        desc_act=fields.flag("desc_act", False),
        zero_offset=_ZERO_OFFSETS[version],
        tensors=tensors,
    )
    has_head = fields.flag("lm_head", False)
    only = _names_in_block(fields)
    rules = _dynamic_rules(fields, base)

    def rule_of(prefix: str) -> GPTQScheme | None:
        return next((scheme for pattern, scheme in rules if pattern.matches(prefix)), base)

    def leaves_out(prefix: str) -> bool:
        if not in_block(prefix):
            return not has_head
        if only is not None and not any(prefix.endswith(f".{name}") for name in only):
            return True
        return rule_of(prefix) is None

    return ConfiguredLayers(lambda prefix: rule_of(prefix) or base, leaves_out, ("qweight",), tensors)


def _names_in_block(fields: Fields) -> tuple[str, ...] | None:
    """Read modules_in_block_to_quantize: names within a block, or lists of them; None: all."""
    value = fields.raw("modules_in_block_to_quantize")
    if value is None:
        return None
    names: list[Any] = []
    for entry in value if isinstance(value, list) else [None]:
        names.extend(entry if isinstance(entry, list) else [entry])
    if not all(isinstance(name, str) for name in names):
        raise fields.refusal("modules_in_block_to_quantize", value, "expected a list of names, or of lists of names")
    return tuple(names)


def _dynamic_rules(fields: Fields, base: GPTQScheme) -> list[tuple[Pattern, GPTQScheme | None]]:
    """Read dynamic: patterns of layers -> what is different there; None for those that `-:` leaves out."""
    rules: list[tuple[Pattern, GPTQScheme | None]] = []
    value = fields.raw("dynamic")
    if not value:
        return rules
    if not isinstance(value, dict) or len(value) > MAX_RULES:
        raise fields.refusal("dynamic", value, f"expected an object of at most {MAX_RULES} patterns")
    for expression, overrides in value.items():
        pattern = Pattern(expression.removeprefix("-:").removeprefix("+:"))
        if expression.startswith("-:"):
            rules.append((pattern, None))
            continue
        if not isinstance(overrides, dict):
            raise fields.refusal(f"dynamic.{expression}", overrides, "expected an object")
        changed = Fields(overrides, f"quantization_config.dynamic.{expression}.")
        for name in ("format", "checkpoint_format", "method", "quant_method", "pack_dtype"):
            refuse_unless(changed, name, (None, fields.raw(name)))
        scheme = GPTQScheme(
            bits=choose_bits(changed, ("bits",), GPTQ_BITS) if changed.has("bits") else base.bits,
            group_size=read_group_size(changed, "group_size") if changed.has("group_size") else base.group_size,
            desc_act=changed.flag("desc_act", base.desc_act),
            zero_offset=base.zero_offset,
            tensors=base.tensors,
        )
        rules.append((pattern, scheme))
    return rules


def read_awq(fields: Fields, tensors: Tensors | None) -> Quantization:
    """Read what AutoAWQ and others wrote.

    Raises:
        ModelConfigError: a value is malformed or not supported.
    """
    choose_bits(fields, ("w_bit", "bits"), (AWQ_BITS,))
    refuse_unless(fields, "backend", (None, "autoawq"))
    version = fields.raw("version")
    layout = version.lower() if isinstance(version, str) else version
    layout = Fields({"version": layout}, "quantization_config.").choice("version", "gemm", _AWQ_LAYOUTS)
    size = "q_group_size" if fields.has("q_group_size") else "group_size"
    scheme = AWQScheme(layout, read_group_size(fields, size), tensors)
    kept = read_names(fields, "modules_to_not_convert")
    fields.flag("zero_point", True)  # whether there are any is seen in the tensors

    def leaves_out(prefix: str) -> bool:
        # As AutoAWQ has it: any part of a name.
        return not in_block(prefix) or any(name in prefix for name in kept)

    return ConfiguredLayers(lambda prefix: scheme, leaves_out, ("qweight",), tensors)
