"""What a model folder is and whether it would run, from its headers alone: `models inspect` shows it, `serve` asks first."""

from dataclasses import dataclass, field
from pathlib import Path

from octavo.cli.checkpoint import CheckpointFile, read_checkpoint
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.frontend.model import ModelFiles, load_model_files
from octavo.frontend.tokenizer import ModelFilesError
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import load_model_config
from octavo.worker.models.description import ModelConfig


@dataclass
class Examined:
    """The parts of a model folder; a part is None where it is missing or broken, and `problems` says why."""

    config: ModelConfig | None = None
    weights: list[CheckpointFile] | None = None
    text: ModelFiles | None = None
    problems: list[str] = field(default_factory=list)
    problem_of_weights: str | None = None  # also among the problems


def examine(folder: Path) -> Examined:
    """Read config, headers of the weights, tokenizer and chat template."""
    found = Examined()
    try:
        found.config = load_model_config(folder)
    except ModelConfigError as error:
        found.problems.append(str(error))
    try:
        found.weights = read_checkpoint(folder)
    except CommandError as error:
        found.problem_of_weights = str(error)
        found.problems.append(found.problem_of_weights)
    try:
        found.text = load_model_files(folder)
    except (ModelFilesError, FileNotFoundError) as error:
        found.problems.append(str(error))
    return found


def require_servable(folder: Path, *, with_weights: bool) -> None:
    """Check a model folder before any process starts.

    Args:
        folder: the model.
        with_weights: whether weights are needed (not with --load-format dummy).

    Raises:
        ConfigurationError: it would not run; the message says why.
    """
    found = examine(folder)
    needed = [found.config, found.text] + ([found.weights] if with_weights else [])
    if any(part is None for part in needed):
        problems = [problem for problem in found.problems if with_weights or problem != found.problem_of_weights]
        raise ConfigurationError(f"{folder} cannot be served: {'; '.join(problems)}")
