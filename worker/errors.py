"""What stops a worker from starting, and what ends its session."""


class StartError(Exception):
    """The worker cannot start as configured: say why and exit; starting again would not help."""


class CannotListen(Exception):
    """A port is taken: whoever listens there may be about to leave, so a later start may succeed."""


class ModelConfigError(StartError):
    """config.json is missing, malformed, or describes something that is not supported."""


class WeightsError(StartError):
    """The weights are missing, damaged, or do not fit the config."""


class MemoryShortage(StartError):
    """What was asked for does not fit; the message names need and free."""


class DeviceHung(Exception):
    """The device does not come to the end of what it was given; only another process can use it again, if any."""


class PlanError(Exception):
    """A plan contradicts the rows: the state is damaged, so the session must end and every row with it."""
