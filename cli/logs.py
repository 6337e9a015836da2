"""Logging of every process: one line an event, on standard error, with the role."""

import logging


def configure(role: str, level: str) -> None:
    """Set the log format and level (a name of the module logging, in lower case) of this process."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {role:<10}%(levelname)s %(message)s", datefmt="%H:%M:%S", force=True
    )
