"""Which forms of quantised weights a backend multiplies by as they are; all others become plain numbers at load."""

import torch
from torch import Tensor

from octavo.kernels.weights import Float8Weight, GroupedWeight, TableWeight

Form = type[Tensor] | type[GroupedWeight] | type[TableWeight] | type[Float8Weight]

_LINEAR: dict[str, tuple[Form, ...]] = {
    "reference": (),
    "cpu": (GroupedWeight,),
    "triton": (GroupedWeight, TableWeight, Float8Weight),
}
_EXPERTS: dict[str, tuple[Form, ...]] = {"reference": (), "cpu": (GroupedWeight,), "triton": ()}
_OF_16_BITS = ("triton",)
"""Backends that keep no form in fp32 models."""


def is_kept(form: Form, backend: str, dtype: torch.dtype, *, of_experts: bool = False) -> bool:
    """Say whether a backend keeps weights of a form as they are, in a model of a dtype; plain ones always.

    A backend may still refuse sizes that no checkpoint known to us has (odd groups); it says so in the log.
    """
    if form is Tensor:
        return True
    if backend in _OF_16_BITS and dtype == torch.float32:
        return False
    return form in (_EXPERTS if of_experts else _LINEAR)[backend]
