"""Where there is no GPU, Triton's kernels run through its interpreter: it must be told before they are defined."""

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    try:
        from triton.runtime import interpreter
    except ImportError:  # not every platform has Triton
        pass
    else:
        patch_tensor = interpreter._patch_lang_tensor

        def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
            """Let loop bounds be loaded values: Triton 3.6 makes ints of arrays of one element, NumPy 2.4 refuses."""
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_tensor_and_index
