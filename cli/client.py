"""octavo generate | chat: clients for the terminal that stream."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import grpc
import typer

from octavo.cli.command import Command
from octavo.cli.connection import Connection, connected
from octavo.cli.connection_options import DEFAULT_ADDRESS, Address, ApiKey, TlsCa, TlsCert, TlsKey
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

ModelName = Annotated[str, typer.Option("--model", help="Name of the model; default: the service's.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Most tokens of the answer.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0: greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus mass.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Number of most likely tokens kept.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the noise.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer (may be repeated).")]
Priority = Annotated[
    int,
    typer.Option(
        "--priority",
        min=-(2**31),
        max=2**31 - 1,
        help="Lower runs earlier; needs a scheduling policy that takes priorities.",
    ),
]
CacheSalt = Annotated[
    str, typer.Option("--cache-salt", help="Share cached prefixes only with requests of the same salt.")
]
ShowUsage = Annotated[
    bool, typer.Option("--usage", help="Say on standard error what an answer cost: tokens, cached ones, times.")
]
EXIT_INTERRUPTED = 130
"""As a shell reports SIGINT: what was printed is not the whole answer."""


class Answer(NamedTuple):
    """What was printed, and whether Ctrl-C cut it short."""

    text: str
    is_cut: bool
    usage: pb.Usage | None


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    model: ModelName = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    priority: Priority = 0,
    cache_salt: CacheSalt = "",
    usage: ShowUsage = False,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Continue a text and print it as it comes."""
    # The newline that ends a piped text is the shell's, not the author's; most models continue badly after it.
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    request = pb.GenerationInput(
        model=model,
        text=text,
        sampling=_sampling(temperature, top_p, top_k, seed),
        stopping=pb.StoppingParams(max_tokens=max_tokens, stop_strings=stop or []),
        priority=priority,
        cache_salt=cache_salt,
    )
    with connected(address, api_key, tls_ca, tls_cert, tls_key) as connection:
        answer = _stream(connection, request)
    _end(answer, usage)
    if answer.is_cut:
        raise typer.Exit(EXIT_INTERRUPTED)


def chat(
    message: Annotated[str | None, typer.Argument(help="Ask this alone and end, instead of a conversation.")] = None,
    address: Address = DEFAULT_ADDRESS,
    model: ModelName = "",
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    priority: Priority = 0,
    cache_salt: CacheSalt = "",
    usage: ShowUsage = False,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk with a model. /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C cancels an answer."""
    opening = [pb.ChatMessage(role="system", content=system)] if system else []
    messages = list(opening)
    with connected(address, api_key, tls_ca, tls_cert, tls_key) as connection:
        while (line := message or _ask()) is not None:
            if line == "/reset":
                messages = list(opening)
            if not line or line == "/reset":
                continue
            messages.append(pb.ChatMessage(role="user", content=line))
            request = pb.GenerationInput(
                model=model,
                chat=pb.ChatPrompt(messages=messages),
                sampling=_sampling(temperature, top_p, top_k, seed),
                stopping=pb.StoppingParams(max_tokens=max_tokens, stop_strings=stop or []),
                priority=priority,
                cache_salt=cache_salt,
            )
            answer = _stream(connection, request)
            _end(answer, usage)
            if message and answer.is_cut:
                raise typer.Exit(EXIT_INTERRUPTED)
            if message:
                return
            messages.append(pb.ChatMessage(role="assistant", content=answer.text))


def _sampling(temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None) -> pb.SamplingParams:
    return pb.SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def _ask() -> str | None:
    """Return the next line, None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/exit" else line


def _stream(connection: Connection, request: pb.GenerationInput) -> Answer:
    """Print an answer as it comes; return it. Ctrl-C ends it early.

    Raises:
        CommandError: the service refused or failed.
    """
    stub = rpc.GenerationServiceStub(connection.channel)
    call = stub.GenerateStream(pb.GenerateStreamRequest(input=request), metadata=connection.metadata)
    pieces = []
    is_cut = is_thinking = False
    usage = None
    with cancelled_by_ctrl_c(call.cancel):
        try:
            for event in call:
                if event.WhichOneof("event") == "delta":
                    # What is thought is no part of the answer: it goes where the figures go.
                    if event.delta.reasoning:
                        is_thinking = True
                        typer.echo(event.delta.reasoning, nl=False, err=True)
                    if is_thinking and event.delta.text:
                        is_thinking = False
                        typer.echo(err=True)
                    pieces.append(event.delta.text)
                    sys.stdout.write(event.delta.text)
                    sys.stdout.flush()
                elif event.WhichOneof("event") == "finished" and event.finished.HasField("usage"):
                    usage = event.finished.usage
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                if pieces or is_thinking:  # what went wrong has a line of its own
                    typer.echo(err=not any(pieces))
                raise connection.failure(error) from error
            is_cut = True
    return Answer("".join(pieces), is_cut, usage)


def _end(answer: Answer, with_usage: bool) -> None:
    """End the line of an answer; say what it cost, if that is wanted and known (it is not after Ctrl-C)."""
    typer.echo()
    if with_usage and answer.usage is not None:
        cost = answer.usage
        times = (("queue", cost.queue_time), ("prefill", cost.prefill_time), ("decode", cost.decode_time))
        spent = ", ".join(f"{name} {time.ToMicroseconds() / 1000:.1f} ms" for name, time in times)
        typer.echo(
            f"prompt {cost.prompt_tokens} tokens ({cost.cached_prompt_tokens} cached), "
            f"output {cost.completion_tokens}; {spent}",
            err=True,
        )


@contextmanager
def cancelled_by_ctrl_c(cancel: Callable[[], object]) -> Iterator[None]:
    """Let Ctrl-C cancel a call, instead of raising KeyboardInterrupt, for a while."""
    previous = signal.signal(signal.SIGINT, lambda *_: cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(cls=Command)(generate)
    app.command(cls=Command)(chat)
