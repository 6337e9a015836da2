"""How long a step may take, where nobody has said it."""

CPU_STEP_TIMEOUT_S = 300.0
GPU_STEP_TIMEOUT_S = 60.0


def step_timeout_s(setting: float | None, device: str) -> float:
    """Return the seconds without a finished step after which a worker counts as lost.

    Args:
        setting: of --step-timeout; None: what suits the device.
        device: of the worker, as its facts name it.
    """
    if setting is not None:
        return setting
    return GPU_STEP_TIMEOUT_S if device.startswith("cuda") else CPU_STEP_TIMEOUT_S
