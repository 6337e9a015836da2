"""Options of commands that talk to a running service; gRPC is not loaded for them."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_ADDRESS = "127.0.0.1:50051"

Address = Annotated[
    str,
    typer.Option(
        "--address", envvar="OCTAVO_ADDRESS", help="HOST:PORT of the service; https://HOST:PORT speaks TLS with it."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="OCTAVO_API_KEY",
        help="Key of the service. Others on this machine can read a command line: prefer the variable.",
        show_default=False,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="OCTAVO_TLS_CA",
        help="PEM file of the authority that signed the service's certificate, or the certificate itself; speaks TLS.",
        dir_okay=False,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", envvar="OCTAVO_TLS_CERT", help="PEM file of our certificate, for mutual TLS.", dir_okay=False
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", envvar="OCTAVO_TLS_KEY", help="PEM file of its private key.", dir_okay=False),
]
