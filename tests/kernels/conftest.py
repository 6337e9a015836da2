"""Where there is no GPU, Triton's kernels run through its interpreter: it must be told before they are defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
