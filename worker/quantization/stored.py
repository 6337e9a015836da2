"""What formats share: the raw tensors of a projection while they are read, and how they become one weight."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from octavo.kernels.weights import Weight, join, take_outputs
from octavo.worker.errors import ModelConfigError, WeightsError
from octavo.worker.models.targets import Placement, Target
from octavo.worker.quantization.scheme import LinearShape, Projection

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Names of safetensors for what scales are stored in."""


class StoredTensor(Protocol):
    """What a checkpoint says of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        ...

    @property
    def dtype(self) -> str:
        """Its dtype, as safetensors call it: F16."""
        ...


Tensors: TypeAlias = Mapping[str, StoredTensor]
"""All tensors of a checkpoint by name."""


class StoredProjection(Protocol):
    """The tensors of one projection while they are read."""

    @property
    def targets(self) -> dict[str, Target]:
        """Full name of each tensor in the checkpoint -> where it goes."""
        ...

    def finish(self) -> Weight:
        """Return the canonical weight of the outputs that this rank takes.

        Raises:
            WeightsError: what was read contradicts itself.
        """
        ...


class StoredProjections:
    """A layer whose projections are stored one by one."""

    def __init__(self, parts: Sequence[StoredProjection]) -> None:
        self._parts = list(parts)
        self.targets: dict[str, Target] = {}
        for part in parts:
            self.targets |= part.targets

    def finish(self) -> list[Weight]:
        """Return one weight, or one for each projection where they cannot be joined; the raw tensors are let go."""
        self.targets.clear()
        weights: list[Weight] = []
        while self._parts:
            weights.append(self._parts.pop(0).finish())
        joined = join(weights)
        return weights if joined is None else [joined]


class RawTensors:
    """The tensors of one projection, in memory as the checkpoint has them.

    Args:
        placement: the device.
        prefix: of the tensors' names.
        tensors: of the checkpoint; None where there is none (random weights): then it is taken to be as tools write it.
    """

    def __init__(self, placement: Placement, prefix: str, tensors: Tensors | None) -> None:
        self.prefix = prefix
        self.targets: dict[str, Target] = {}
        self._device = placement.device
        self._tensors = tensors

    def add(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], part: tuple[slice, ...] | None = None
    ) -> Tensor:
        """Expect a tensor of a shape, of which a part is read; return the memory that it is read into."""
        part = tuple(slice(0, size) for size in shape) if part is None else part
        view = torch.empty([s.stop - s.start for s in part], dtype=dtype, device=self._device)
        self.targets[f"{self.prefix}.{name}"] = Target(view, shape, part)
        return view

    def stored(self, name: str) -> StoredTensor | None:
        """Return what the checkpoint says of a tensor, if it has it."""
        return None if self._tensors is None else self._tensors.get(f"{self.prefix}.{name}")

    def has(self, name: str, default: bool) -> bool:
        """Say whether the checkpoint has a tensor; `default` where there is no checkpoint."""
        return default if self._tensors is None else self.stored(name) is not None

    def float_dtype(self, name: str, default: torch.dtype) -> torch.dtype:
        """Return the floating point dtype that a tensor is stored in."""
        stored = self.stored(name)
        return default if stored is None else FLOAT_DTYPES.get(stored.dtype, default)

    def error(self, name: str, problem: str) -> WeightsError:
        """Return the error that says what is wrong with a tensor."""
        return WeightsError(f"tensor {self.prefix}.{name}: {problem}")


class Outputs:
    """Which outputs of a projection are read, and which of them are wanted.

    Args:
        projection: what this rank takes.
        unit: outputs that lie in one word and so are read together.
    """

    def __init__(self, projection: Projection, unit: int = 1) -> None:
        self._projection = projection
        if projection.order is not None:
            self.read = slice(0, projection.features)
            return
        start, stop = projection.part.start, projection.part.stop
        self.read = slice(start // unit * unit, min(-(-stop // unit) * unit, projection.features))

    @property
    def num_read(self) -> int:
        """Outputs that are read."""
        return self.read.stop - self.read.start

    def wanted(self, weight: Weight) -> Weight:
        """Return the weight of the outputs that are wanted, of the weight of all that were read."""
        projection = self._projection
        if projection.order is None and projection.part == self.read:
            return weight
        index = projection.order
        if index is None:
            index = torch.arange(projection.part.start, projection.part.stop) - self.read.start
        return take_outputs(weight, index.to(device_of(weight)))


def device_of(weight: Weight) -> torch.device:
    """Return where a weight lies."""
    if isinstance(weight, Tensor):
        return weight.device
    return weight.packed.device if hasattr(weight, "packed") else weight.codes.device


def inputs_of(shape: LinearShape, unit: int, prefix: str) -> slice:
    """Return the inputs that this rank takes.

    Raises:
        ModelConfigError: they cut a unit of inputs that belong together (a group, a word of codes).
    """
    part = shape.in_part
    for end in (part.start, part.stop):
        if end % unit and end != shape.in_features:
            raise ModelConfigError(
                f"{prefix}: inputs {part.start} to {part.stop} of {shape.in_features} cut units of {unit} that are "
                "quantised together; choose another --tensor-parallel-size"
            )
    return part


def check_multiple(prefix: str, what: str, size: int, unit: int, method: str) -> None:
    """Refuse a size that a format cannot store.

    Raises:
        ModelConfigError: it is no multiple of `unit`.
    """
    if size % unit:
        raise ModelConfigError(f"{prefix} has {size} {what}: {method} stores multiples of {unit}")


def check_plain_orientation(prefix: str, shape: LinearShape, method: str) -> None:
    """Refuse matrices that the model's checkpoints hold transposed.

    Raises:
        ModelConfigError: they do.
    """
    if shape.transposed:
        raise ModelConfigError(f"{prefix}: {method} is not supported for layers that are stored as [inputs, outputs]")


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Read codes that lie bit after bit in words, low bits first: [R, W] int32 -> [R, W * 32 / bits] uint8.

    Codes of 3 bits cross words: 32 of them fill three, so W is a multiple of 3.
    """
    rows, width = words.shape
    words_in_turn = bits if 32 % bits else 1
    codes_in_turn = words_in_turn * 32 // bits
    turns = words.reshape(rows, width // words_in_turn, words_in_turn)
    codes = torch.empty((rows, width // words_in_turn, codes_in_turn), dtype=torch.uint8, device=words.device)
    for place in range(codes_in_turn):
        word, shift = divmod(place * bits, 32)
        code = turns[:, :, word] >> shift
        if shift + bits > 32:
            low = 32 - shift
            code = (code & (2**low - 1)) | (turns[:, :, word + 1] << low)
        codes[:, :, place] = code & (2**bits - 1)
    return codes.flatten(1)


def held_bits(bits: int) -> int:
    """Return the width that codes are held in: 3 bits take 4."""
    return 4 if bits == 3 else bits
