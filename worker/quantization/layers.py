"""Which layers of a checkpoint are quantised, and as what."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import Weight, join
from octavo.worker.models.targets import Placement, Target
from octavo.worker.quantization.plain import PLAIN, PlainLinear
from octavo.worker.quantization.scheme import LinearScheme, LinearShape, Quantization, StoredLinear
from octavo.worker.quantization.stored import FLOAT_DTYPES, Tensors

logger = logging.getLogger(__name__)

_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


@dataclass(frozen=True)
class ConfiguredLayers:
    """The layers of a quantised checkpoint.

    The config says which layers are quantised. Tools disagree about how its lists are meant, so a checkpoint that is
    there has the last word: a layer with a weight in floating point and nothing else is plain, one with the tensors of
    the format is not.

    Attributes:
        scheme_for: format of a layer that is quantised; None: the config knows none.
        leaves_out: whether the config leaves a layer out.
        marks: tensors that only quantised layers have.
        tensors: of the checkpoint; None where there is none.
    """

    scheme_for: Callable[[str], LinearScheme | None]
    leaves_out: Callable[[str], bool]
    marks: tuple[str, ...]
    tensors: Tensors | None

    def scheme_of(self, prefix: str) -> LinearScheme:
        """Return the format of the linear layer with this prefix in the checkpoint."""
        stored = self._stored(prefix)
        if stored is False or (stored is None and self.leaves_out(prefix)):
            return PLAIN
        scheme = self.scheme_for(prefix)
        return PLAIN if scheme is None else scheme

    def is_ignored(self, name: str) -> bool:
        """Say whether this is a scale of the KV cache: keys and values are kept as they are, or cut to 8 bits as they are."""
        if not name.endswith(_CACHE_SCALES):
            return False
        _say_ignored()
        return True

    def _stored(self, prefix: str) -> bool | None:
        """Say whether the checkpoint has the layer quantised; None where it does not tell."""
        if self.tensors is None:
            return None
        if any(f"{prefix}.{mark}" in self.tensors for mark in self.marks):
            return True
        weight = self.tensors.get(f"{prefix}.weight")
        return False if weight is not None and weight.dtype in FLOAT_DTYPES else None


@dataclass(frozen=True)
class QuantizedOnLoad:
    """Plain checkpoints whose layers are quantised as they are loaded.

    Attributes:
        quantize: a weight.
        with_head: the output head as well; else what is outside of blocks stays plain.
    """

    quantize: Callable[[Tensor], Weight]
    with_head: bool = False

    def scheme_of(self, prefix: str) -> LinearScheme:
        """Return the format of the linear layer with this prefix in the checkpoint."""
        return OnLoadScheme(self.quantize) if self.with_head or in_block(prefix) else PLAIN

    def is_ignored(self, name: str) -> bool:
        """Say that no tensor is left unread."""
        return False


@dataclass(frozen=True)
class OnLoadScheme:
    """Weights that are plain in the checkpoint and quantised when they have been read."""

    quantize: Callable[[Tensor], Weight]

    form: ClassVar[Form] = Tensor

    def make(self, placement: Placement, shape: LinearShape) -> "_OnLoadLinear":
        """Allocate the plain matrix."""
        return _OnLoadLinear(PLAIN.make(placement, shape), self.quantize)


@dataclass
class _OnLoadLinear:
    plain: PlainLinear
    quantize: Callable[[Tensor], Weight]
    targets: dict[str, Target] = field(init=False)

    def __post_init__(self) -> None:
        self.targets = self.plain.targets

    def finish(self) -> list[Weight]:
        """Return the fused weight, quantised."""
        return [self.quantize(weight) for weight in self.plain.finish() if isinstance(weight, Tensor)]


def make_stored(quantization: Quantization, placement: Placement, shape: LinearShape) -> StoredLinear:
    """Allocate what the tensors of a layer are read into, each projection in the format that is its own.

    Raises:
        ModelConfigError: a layer of this shape cannot be stored so.
    """
    schemes = [quantization.scheme_of(projection.prefix) for projection in shape.projections]
    if all(scheme == schemes[0] for scheme in schemes):
        return schemes[0].make(placement, shape)
    pairs = zip(schemes, shape.projections, strict=True)
    return _Mixed([scheme.make(placement, replace(shape, projections=(one,))) for scheme, one in pairs])


class _Mixed:
    """A layer whose projections are stored in different formats."""

    def __init__(self, parts: list[StoredLinear]) -> None:
        self._parts = parts
        self.targets: dict[str, Target] = {}
        for part in parts:
            self.targets |= part.targets

    def finish(self) -> list[Weight]:
        """Return one weight where they can be joined, else the weights of all parts in their order."""
        weights = [weight for part in self._parts for weight in part.finish()]
        self.targets.clear()
        joined = join(weights)
        return weights if joined is None else [joined]


@cache
def _say_ignored() -> None:
    """Log it once."""
    logger.warning("the checkpoint has scales for a quantised KV cache, which are not used")


def in_block(prefix: str) -> bool:
    """Say whether a layer is part of one of the model's blocks, which are numbered, and not the output head."""
    return any(part.isdigit() for part in prefix.split("."))


def listed(prefix: str, entries: Sequence[str]) -> bool:
    """Say whether a list names a layer: its prefix, the end of it, or what it is part of."""
    return any(
        prefix == entry or prefix.startswith(f"{entry}.") or prefix.endswith(f".{entry}") for entry in entries if entry
    )
