from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("models", "ready", "reason", "processes", "scheduler", "max_model_len")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    ready: bool
    reason: str
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStatus]
    scheduler: SchedulerStatus
    max_model_len: int
    def __init__(self, models: _Optional[_Iterable[str]] = ..., ready: _Optional[bool] = ..., reason: _Optional[str] = ..., processes: _Optional[_Iterable[_Union[ProcessStatus, _Mapping]]] = ..., scheduler: _Optional[_Union[SchedulerStatus, _Mapping]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class ProcessStatus(_message.Message):
    __slots__ = ("role", "pid", "boot_id", "epoch", "state")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    role: str
    pid: int
    boot_id: str
    epoch: int
    state: str
    def __init__(self, role: _Optional[str] = ..., pid: _Optional[int] = ..., boot_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "total_blocks", "free_blocks", "block_size", "steps", "preemptions")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    total_blocks: int
    free_blocks: int
    block_size: int
    steps: int
    preemptions: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...
