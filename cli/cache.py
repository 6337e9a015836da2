"""octavo cache reset: make a running service forget its cached prefixes."""

import grpc
import typer

from octavo.cli.command import Command
from octavo.cli.connection import connected
from octavo.cli.connection_options import DEFAULT_ADDRESS, Address, ApiKey, TlsCa, TlsCert, TlsKey
from octavo.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 5.0

app = typer.Typer(
    name="cache", help="The prefix cache of a running service.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _cache() -> None:
    """Keep `reset` a command of its own: Typer would make a single command the group itself."""


@app.command("reset", cls=Command)
def reset(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Forget all cached prefixes, so that no later request finds what was computed before. Running requests go on."""
    with connected(address, api_key, tls_ca, tls_cert, tls_key) as connection:
        try:
            answer = admin_pb2_grpc.AdminServiceStub(connection.channel).ResetPrefixCache(
                admin_pb2.ResetPrefixCacheRequest(), timeout=_TIMEOUT_S, metadata=connection.metadata
            )
        except grpc.RpcError as error:
            raise connection.failure(error) from error
    number = answer.dropped_blocks
    held = f"the prefix cache is empty: it held {number} block{'s' if number > 1 else ''}"
    typer.echo(held if number else "the prefix cache was empty")


def register(parent: typer.Typer) -> None:
    """Add the commands of this module."""
    parent.add_typer(app)
