"""What the command line tells its user instead of a traceback."""


class CommandError(Exception):
    """The command cannot do what was asked; the message says why and, where possible, what would help."""

    exit_code = 1


class ConfigurationError(CommandError):
    """The configuration is wrong: starting again without changing it would not help."""

    exit_code = 2
