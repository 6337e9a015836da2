"""Which code computes a model: the decoder that config.json describes, or transformers' own. Imports no torch."""

from typing import Any, Literal

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import SUPPORTED_ARCHITECTURES, architecture_of

Implementation = Literal["octavo", "transformers"]

IMPLEMENTATIONS = ("auto", "octavo", "transformers")
"""Values of --model-impl."""


def choose_implementation(values: dict[str, Any], asked: str) -> Implementation:
    """Return whose code computes the model.

    Args:
        values: of config.json.
        asked: one of IMPLEMENTATIONS; auto: the described decoder where it knows the architecture, else transformers.

    Raises:
        ModelConfigError: the decoder is asked for and does not know the architecture, or config.json says already that
            transformers cannot be used here.
    """
    architecture = architecture_of(values)
    if asked != "transformers" and architecture in SUPPORTED_ARCHITECTURES:
        return "octavo"
    if asked == "octavo":
        raise ModelConfigError(
            f"architecture {architecture!r} is not supported by --model-impl octavo; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    _refuse(architecture, values)
    return "transformers"


def _refuse(architecture: str, values: dict[str, Any]) -> None:
    """Refuse what paged attention within transformers cannot do, as far as config.json alone shows it."""
    if values.get("auto_map") is not None:
        raise refusal(architecture, "brings code of its own (auto_map): code of a model folder is never run")
    if values.get("is_encoder_decoder"):
        raise refusal(architecture, "is an encoder and a decoder (is_encoder_decoder)")
    if values.get("add_cross_attention"):
        raise refusal(architecture, "has cross attention (add_cross_attention)")
    if values.get("alibi"):
        raise refusal(architecture, "adds biases by distance to its scores (alibi)")
    for path, inner in _objects(values):
        if inner.get("quantization_config") is not None:
            raise refusal(architecture, f"is quantised ({path}quantization_config)")
    if not isinstance(values.get("model_type"), str):
        raise ModelConfigError(
            f"architecture {architecture!r} is not supported: it is not described here (there are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}), and transformers would need a name in model_type, which is "
            f"{values.get('model_type')!r}"
        )


def refusal(architecture: str, trait: str) -> ModelConfigError:
    """Return the error that names the trait because of which transformers cannot be used here."""
    return ModelConfigError(f"{architecture} {trait}, which is not supported where transformers computes the model")


def _objects(values: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return config.json's objects and their paths: itself, and those right within."""
    return [("", values)] + [(f"{name}.", inner) for name, inner in values.items() if isinstance(inner, dict)]
