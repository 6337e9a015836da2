"""The GPU backend: Triton kernels for the operations of ``octavo.kernels.reference``, one file an operation."""
