"""The ids in a row's sampling parameters."""

from octavo.wire.columns import unpack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.errors import PlanError


def check_sampling_ids(sampling: RowSampling, vocab_size: int) -> None:
    """Check the ids in a row's parameters.

    Raises:
        PlanError: one lies outside of the vocabulary.
        MalformedMessage: a list is no column.
    """
    for what in ("stop_token_ids", "allowed_token_ids", "logit_bias_ids", "bad_word_ids"):
        values = unpack_ints(getattr(sampling, what))
        if values and not (min(values) >= 0 and max(values) < vocab_size):
            name = what.removesuffix("_ids") if what == "logit_bias_ids" else what
            raise PlanError(f"{name} holds an id outside of [0, {vocab_size})")
