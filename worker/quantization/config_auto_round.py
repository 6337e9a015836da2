"""quantization_config of auto-round's own format: the layouts of GPTQ and AWQ, with widths for single layers."""

from dataclasses import dataclass

from octavo.worker.models.fields import Fields
from octavo.worker.quantization.awq import AWQ_BITS, AWQScheme
from octavo.worker.quantization.config_values import MAX_NAMES, choose_bits, read_group_size, refuse_unless
from octavo.worker.quantization.gptq import GPTQ_BITS, GPTQScheme
from octavo.worker.quantization.layers import ConfiguredLayers, in_block
from octavo.worker.quantization.patterns import Pattern
from octavo.worker.quantization.scheme import LinearScheme, Quantization
from octavo.worker.quantization.stored import Tensors

LAYOUTS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_PLAIN_BITS = 16
"""From here on a layer is not quantised."""


@dataclass(frozen=True)
class _Layout:
    """How quantised layers lie in the checkpoint."""

    name: str
    tensors: Tensors | None

    def scheme(self, fields: Fields, group_size: int | None) -> LinearScheme:
        if self.name == LAYOUTS[0]:  # zero points are stored minus one, and there is no g_idx
            return GPTQScheme(choose_bits(fields, ("bits",), GPTQ_BITS), group_size, False, 1, self.tensors)
        choose_bits(fields, ("bits",), (AWQ_BITS,))
        return AWQScheme("gemm", group_size, self.tensors)


def read_auto_round(fields: Fields, tensors: Tensors | None) -> Quantization:
    """Read what auto-round writes unless it is asked for the format of another tool.

    Raises:
        ModelConfigError: a value is malformed or not supported.
    """
    _check_kind(fields)
    layout = _Layout(fields.choice("packing_format", LAYOUTS[0], LAYOUTS), tensors)
    group_size = read_group_size(fields, "group_size")
    base = layout.scheme(fields, group_size)
    exact: dict[str, LinearScheme | None] = {}
    patterns: list[tuple[Pattern, LinearScheme | None]] = []
    for name, changed in _extra(fields).items():
        if changed.has("bits") and changed.count("bits") >= _PLAIN_BITS:
            scheme = None
        else:
            _check_kind(changed)
            size = read_group_size(changed, "group_size") if changed.has("group_size") else group_size
            scheme = layout.scheme(changed if changed.has("bits") else fields, size)
        if name.replace(".", "").replace("_", "").isalnum():
            exact[name] = scheme
        else:  # looked for anywhere in the name
            patterns.append((Pattern(f".*(?:{name})"), scheme))

    def rule_of(prefix: str) -> LinearScheme | None:
        if prefix in exact:
            return exact[prefix]
        return next((scheme for pattern, scheme in patterns if pattern.matches(prefix)), base)

    def leaves_out(prefix: str) -> bool:
        return rule_of(prefix) is None or not (in_block(prefix) or prefix in exact)

    return ConfiguredLayers(lambda prefix: rule_of(prefix) or base, leaves_out, ("qweight",), tensors)


def _check_kind(fields: Fields) -> None:
    refuse_unless(fields, "data_type", (None, "int"))
    if fields.has("act_bits") and fields.count("act_bits") < _PLAIN_BITS:
        raise fields.refusal("act_bits", fields.raw("act_bits"), "not supported; 16 is")


def _extra(fields: Fields) -> dict[str, Fields]:
    """Read extra_config: names or patterns of layers -> what is different there."""
    value = fields.raw("extra_config")
    if not value:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_NAMES:
        raise fields.refusal("extra_config", value, f"expected an object of at most {MAX_NAMES} layers")
    extra: dict[str, Fields] = {}
    for name, changed in value.items():
        if not isinstance(changed, dict):
            raise fields.refusal(f"extra_config.{name}", changed, "expected an object")
        extra[name] = Fields(changed, f"quantization_config.extra_config.{name}.")
    return extra
