"""Run under python -O, where `assert` does nothing: what must be refused is refused all the same.

The checks here raise by themselves, since under -O a test's own asserts would be silent.
"""

import pytest

from octavo.wire.channel import check_address
from octavo.wire.columns import pack_ints
from octavo.wire.errors import MalformedMessage, WireError
from octavo.wire.plan import StepPlan
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import parse_model_config


def test_asserts_are_off() -> None:
    """Guard the run itself: without -O it would show nothing."""
    if __debug__:
        pytest.fail("run with python -O")


def test_a_malformed_plan_is_refused() -> None:
    """The wire's checks do not lean on assert."""
    with pytest.raises(MalformedMessage):
        StepPlan(1, 1, row=pack_ints([1]), num_tokens=b"", flags=b"")


def test_a_foreign_address_is_refused() -> None:
    """Nor do those of addresses."""
    with pytest.raises(WireError):
        check_address("tcp://192.0.2.1:5000")


def test_an_unknown_architecture_is_refused() -> None:
    """Nor do those of model folders."""
    with pytest.raises(ModelConfigError):
        parse_model_config({"architectures": ["NoSuchModel"]})
