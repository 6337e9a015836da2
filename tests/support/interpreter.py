"""Triton's interpreter, which runs the GPU kernels on tensors of the CPU: where there is no GPU it must be told early."""

import os
from typing import Any

import torch


def use_where_there_is_no_gpu() -> None:
    """Let kernels that are defined from here on run through the interpreter, if there is no GPU."""
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter
    except ImportError:  # not every platform has Triton
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Let loop bounds be loaded values: Triton 3.6 makes ints of arrays of one element, NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
