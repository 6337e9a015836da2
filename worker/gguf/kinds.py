"""Which types of tensors in GGUF files are read."""

from pathlib import Path

from gguf.constants import GGMLQuantizationType as Kind

from octavo.worker.gguf.header import GgufError, TensorInfo

READABLE = (
    *(Kind.F32, Kind.F16, Kind.BF16),
    *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(
        Kind.IQ1_S,
        Kind.IQ1_M,
        Kind.IQ2_XXS,
        Kind.IQ2_XS,
        Kind.IQ2_S,
        Kind.IQ3_XXS,
        Kind.IQ3_S,
        Kind.IQ4_NL,
        Kind.IQ4_XS,
    ),
    *(Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4),
)
"""What `gguf.quants` makes floats of."""


def require_readable(path: Path, tensor: TensorInfo) -> None:
    """Refuse a tensor of a type that is not read.

    Raises:
        GgufError: it is.
    """
    if tensor.type not in READABLE:
        known = ", ".join(kind.name for kind in READABLE)
        raise GgufError(f"{path}: tensor {tensor.name} has type {tensor.type.name}, expected one of {known}")
