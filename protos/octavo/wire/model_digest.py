"""What frontend and worker must agree about before they talk: the model."""

import hashlib
from pathlib import Path


def model_digest(folder: Path) -> str:
    """Return the SHA-256 (hex) of the folder's config.json, the identity of the model between processes.

    Raises:
        FileNotFoundError: the folder has no config.json.
    """
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
