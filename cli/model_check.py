"""What a model folder is and whether it would run, from its headers alone: `models inspect` shows it, `serve` asks first."""

from dataclasses import dataclass, field

from octavo.cli.checkpoint import CheckpointFile, read_checkpoint
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.cli.model_store import Model
from octavo.frontend.model import ModelFiles, load_model_files
from octavo.frontend.tokenizer import ModelFilesError
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import CONFIG_NAME, architecture_of, naming, parse_model_config, read_config_values
from octavo.worker.models.description import ModelConfig
from octavo.worker.models.implementation import choose_implementation
from octavo.worker.quantization.methods import method_of


@dataclass
class Examined:
    """The parts of a model folder; a part is None where it is missing or broken, and `problems` says why."""

    config: ModelConfig | None = None
    foreign: str | None = None  # in place of it: the architecture for which transformers will be tried
    weights: list[CheckpointFile] | None = None
    text: ModelFiles | None = None
    problems: list[str] = field(default_factory=list)
    problem_of_weights: str | None = None  # also among the problems


def examine(model: Model, model_impl: str = "auto") -> Examined:
    """Read config, headers of the weights, tokenizer and chat template.

    Args:
        model: to be looked at.
        model_impl: value of --model-impl.
    """
    found, folder = Examined(), model.folder
    try:
        values = read_config_values(folder)
        with naming(model.gguf or folder / CONFIG_NAME):
            if choose_implementation(values, model_impl) == "octavo":
                found.config = parse_model_config(values)
            elif model.gguf is not None:
                raise ModelConfigError(f"{architecture_of(values)} is not described here: its GGUF file cannot be read")
            else:  # whether transformers can, it alone knows, and it is not loaded here
                found.foreign = architecture_of(values)
    except ModelConfigError as error:
        found.problems.append(str(error))
    try:
        found.weights = read_checkpoint(folder, model.gguf)
    except CommandError as error:
        found.problem_of_weights = str(error)
        found.problems.append(found.problem_of_weights)
    try:
        found.text = load_model_files(folder)
    except (ModelFilesError, FileNotFoundError) as error:
        found.problems.append(str(error))
    return found


def require_servable(
    model: Model,
    load_format: str,
    model_impl: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
) -> None:
    """Check a model before any process starts.

    Args:
        model: to be served.
        load_format: value of --load-format; with `dummy` weights are not needed.
        model_impl: value of --model-impl.
        quantization: value of --quantization.
        max_model_len: value of --max-model-len.

    Raises:
        ConfigurationError: it would not run, or not so; the message says why.
    """
    there, with_weights = "safetensors" if model.gguf is None else "gguf", load_format != "dummy"
    if load_format not in ("auto", "dummy", there):
        raise ConfigurationError(f"--load-format {load_format}, but the weights of {model.source} are {there}")
    found = examine(model, model_impl)
    needed = [found.config or found.foreign, found.text] + ([found.weights] if with_weights else [])
    if any(part is None for part in needed):
        problems = [problem for problem in found.problems if with_weights or problem != found.problem_of_weights]
        raise ConfigurationError(f"{model.source} cannot be served: {'; '.join(problems)}")
    if found.config is not None:
        _check_flags(found.config, quantization, max_model_len)


def _check_flags(config: ModelConfig, quantization: str | None, max_model_len: int | None) -> None:
    try:
        method_of(config.quantization, quantization)
    except ModelConfigError as error:
        raise ConfigurationError(str(error)) from error
    if max_model_len is not None and not 2 <= max_model_len <= config.max_positions:
        raise ConfigurationError(
            f"--max-model-len {max_model_len}: expected 2 to {config.max_positions}, the model's positions"
        )
