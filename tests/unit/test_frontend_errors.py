"""Every error has its status and its details."""

import inspect
import logging

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from octavo.frontend import errors, stream_table
from octavo.wire.requests import FailureCode, RequestFailed

RAISED = {
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ServiceError) and kind not in errors.ABSTRACT_ERRORS
}


def make(kind: type[errors.ServiceError], message: str = "why") -> errors.ServiceError:
    if issubclass(kind, errors.InvalidArgument):
        return kind(message, field_path="input.text")
    if issubclass(kind, errors.ModelNotFound):
        return kind(message, model="other")
    return kind(message)


def details(status: status_pb2.Status) -> dict[str, any_pb2.Any]:
    return {detail.type_url.rpartition(".")[2]: detail for detail in status.details}


def test_the_table_is_total() -> None:
    assert set(errors.RULES) == RAISED
    reasons = [rule.reason for rule in errors.RULES.values()]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("kind", sorted(RAISED, key=str))
def test_every_status_says_reason_and_domain(kind: type[errors.ServiceError]) -> None:
    status = errors.to_status(make(kind), "r-1")
    info = error_details_pb2.ErrorInfo()
    assert details(status)["ErrorInfo"].Unpack(info)
    assert (info.reason, info.domain) == (errors.RULES[kind].reason, "octavo")
    assert status.code == errors.RULES[kind].code.value[0]
    assert "why" in status.message


WITH_DETAIL = {
    grpc.StatusCode.INVALID_ARGUMENT: "BadRequest",
    grpc.StatusCode.NOT_FOUND: "ResourceInfo",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "RetryInfo",
    grpc.StatusCode.UNAVAILABLE: "RetryInfo",
    grpc.StatusCode.INTERNAL: "RequestInfo",
}


@pytest.mark.parametrize("kind", sorted(RAISED, key=str))
def test_each_code_has_its_detail(kind: type[errors.ServiceError]) -> None:
    expected = {"ErrorInfo"} | {WITH_DETAIL.get(errors.RULES[kind].code, "ErrorInfo")}
    assert set(details(errors.to_status(make(kind), "r-1"))) == expected


def test_a_bad_field_is_named() -> None:
    violation = error_details_pb2.BadRequest()
    details(errors.to_status(make(errors.InvalidArgument), ""))["BadRequest"].Unpack(violation)
    assert [(v.field, v.description) for v in violation.field_violations] == [("input.text", "why")]


def test_a_retry_has_its_delay() -> None:
    retry = error_details_pb2.RetryInfo()
    details(errors.to_status(errors.QueueFull("full", retry_after_s=2.5), ""))["RetryInfo"].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500


def test_a_callers_own_limit_is_told_from_a_full_queue() -> None:
    figures = (("max_requests_per_caller", 4), ("requests", 4))
    error = stream_table.FAILURES[FailureCode.CALLER_LIMIT](
        RequestFailed(1, FailureCode.CALLER_LIMIT, "why", 1.0, figures)
    )
    info = error_details_pb2.ErrorInfo()
    status = errors.to_status(error, "")
    details(status)["ErrorInfo"].Unpack(info)
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert info.reason == "CALLER_LIMIT_EXCEEDED" != errors.RULES[errors.QueueFull].reason
    assert dict(info.metadata) == {"max_requests_per_caller": "4", "requests": "4"}


def test_long_messages_fit_into_metadata() -> None:
    status = errors.to_status(errors.InvalidArgument("é\U0001f600" * 100_000, field_path="input.text"), "r")
    # Percent-encoding triples a message, base64 adds a third; gRPC's soft limit is 8 KiB.
    assert len(status.message.encode()) * 3 + len(status.SerializeToString()) * 4 / 3 < 7000


def test_internal_errors_tell_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        try:
            raise KeyError("secret detail")
        except KeyError:
            error = errors.internal_error("r-77")
    assert "secret" not in error.message
    assert "r-77" in error.message
    assert "secret detail" in caplog.text
    assert "r-77" in caplog.text


@pytest.mark.parametrize("code", list(FailureCode))
def test_every_failure_of_the_scheduler_has_an_error(code: FailureCode) -> None:
    error = stream_table.FAILURES[code](RequestFailed(1, code, "why", 3.0))
    assert type(error) in errors.RULES
    assert "why" in str(error)
