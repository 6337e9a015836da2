"""Keys and certificates, from flags, variables and files to the frontend and to the commands that call it."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from octavo.cli import keys, logs, serve
from octavo.cli.connection import connected, failure
from octavo.cli.errors import ConfigurationError
from octavo.cli.main import build
from octavo.cli.program import SECRET_VARIABLES
from octavo.frontend.errors import Unauthenticated
from octavo.frontend.tls import TlsError, TlsFiles
from tests.support.certificates import Authority, make_authority, with_password

FIRST, SECOND, ADMIN = "first-key-of-test", "second-key-of-test", "key-of-an-operator"

Configure = Callable[..., Any]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Return a function that returns the configuration with which `octavo frontend` would start."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(logs, "configure", lambda *_: None)

    def run(*arguments: object, environment: dict[str, str] | None = None) -> Any:
        seen: list[Any] = []

        def start(config: Any) -> int:
            seen.append(config)
            return 0

        monkeypatch.setattr("octavo.frontend.main.run", start)
        words = ["frontend", str(tmp_path), *map(str, arguments)]
        result = CliRunner().invoke(build("frontend"), words, env=environment)
        if isinstance(result.exception, ConfigurationError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return seen[0]

    return run


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> tuple[Path, Path]:
    return authority.issue("server")


def knows(config: Any, key: str) -> bool:
    try:
        return config.auth.check(f"Bearer {key}") is not None
    except Unauthenticated:
        return False


def test_without_flags_there_are_no_keys_and_no_tls(configure: Configure) -> None:
    config = configure()
    assert not config.auth.needs_key
    assert not config.auth.needs_admin_key
    assert (config.tls, config.share_prefix_cache, config.local_socket) == (None, False, "")


def test_keys_come_from_flags_from_the_variable_and_from_a_file(configure: Configure, tmp_path: Path) -> None:
    of_flags = configure("--api-key", FIRST, "--api-key", SECOND)
    of_variable = configure(environment={"OCTAVO_API_KEY": f"{FIRST} {SECOND}"})
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"{FIRST}\n{SECOND}\n")
    of_file = configure("--api-key-file", file)
    for config in (of_flags, of_variable, of_file):
        assert [knows(config, key) for key in (FIRST, SECOND, ADMIN)] == [True, True, False]


def test_a_key_in_the_configuration_is_not_shown_by_help(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(f"api-key: {FIRST}\nadmin-api-key: [{ADMIN}]\n")
    environment = {"OCTAVO_API_KEY": SECOND, "COLUMNS": "300"}
    for command in ("serve", "frontend"):
        done = CliRunner().invoke(build(command), [command, "--config", str(file), "--help"], env=environment)
        assert done.exit_code == 0
        assert "--api-key" in done.output
        assert not [key for key in (FIRST, SECOND, ADMIN) if key in done.output]
    done = CliRunner().invoke(build("generate"), ["generate", "--help"], env=environment)
    assert SECOND not in done.output


def test_a_key_that_cannot_be_one_ends_the_start_without_being_told(configure: Configure, tmp_path: Path) -> None:
    for arguments in (["--api-key", FIRST, "--api-key", "too-short"], ["--admin-api-key", "too-short"]):
        with pytest.raises(ConfigurationError, match="has 9 characters") as refused:
            configure(*arguments)
        assert "too-short" not in str(refused.value)
        assert refused.value.exit_code == 2
    file = tmp_path / "keys"
    file.write_text(FIRST)
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match=f"{file} has mode 0644"):
        configure("--api-key-file", file)


def test_keys_go_to_a_frontend_by_its_environment() -> None:
    assert keys.key_variables(None, None) == {}
    given = keys.key_variables([FIRST, SECOND], [ADMIN])
    assert given == {"OCTAVO_API_KEY": f"{FIRST} {SECOND}", "OCTAVO_ADMIN_API_KEY": ADMIN}
    assert set(given) == SECRET_VARIABLES
    assert FIRST not in repr(keys.Access("here:1", admin_key=FIRST))


def test_the_supervisor_asks_with_a_key_of_the_administration() -> None:
    assert keys.admin_key([FIRST, SECOND], None, [ADMIN]) == ADMIN
    assert keys.admin_key([FIRST, SECOND], None, None) == FIRST
    assert keys.admin_key(None, None, None) is None


def test_certificates_reach_the_frontend(configure: Configure, pair: tuple[Path, Path], authority: Authority) -> None:
    certificate, key = pair
    files = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    assert configure(*files).tls == TlsFiles(certificate, key)
    mutual = configure(*files, "--ssl-ca-certs", authority.certificate)
    assert mutual.tls == TlsFiles(certificate, key, authority.certificate)


def test_half_of_what_tls_needs_is_refused(configure: Configure, pair: tuple[Path, Path]) -> None:
    for arguments in (["--ssl-certfile", pair[0]], ["--ssl-keyfile", pair[1]], ["--ssl-ca-certs", pair[0]]):
        with pytest.raises(ConfigurationError, match="both --ssl-certfile and --ssl-keyfile"):
            configure(*arguments)


def test_files_of_tls_that_cannot_be_used_are_named(
    configure: Configure, pair: tuple[Path, Path], authority: Authority, tmp_path: Path
) -> None:
    certificate, key = pair
    words = tmp_path / "words.pem"
    words.write_text("no certificate\n")
    large = tmp_path / "large.pem"
    large.write_bytes(b"x" * (2**20 + 1))
    locked = with_password(key)
    wrong = [
        (tmp_path / "absent.pem", key, None, "absent.pem cannot be read: No such file"),
        (certificate, tmp_path / "absent.key", None, "absent.key cannot be read: No such file"),
        (certificate, key, tmp_path / "absent.ca", "absent.ca cannot be read: No such file"),
        (authority.certificate, key, None, "authority.pem and .*server.key .* the key is another certificate's"),
        (words, key, None, "words.pem and .*server.key are no certificate with its key"),
        (certificate, key, words, "words.pem holds no certificates"),
        (large, key, None, "large.pem has more than 1048576 bytes"),
        (certificate, locked, None, "server.locked has a password"),
    ]
    for certfile, keyfile, ca_certs, expected in wrong:
        with pytest.raises(TlsError, match=expected):
            TlsFiles(certfile, keyfile, ca_certs).credentials()
        flags: list[object] = ["--ssl-certfile", certfile, "--ssl-keyfile", keyfile]
        with pytest.raises(ConfigurationError, match=expected):
            configure(*flags, *([] if ca_certs is None else ["--ssl-ca-certs", ca_certs]))


def test_with_tls_the_supervisor_asks_over_a_socket_of_its_own(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own folders may be too deep for a Unix socket's path.
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        monkeypatch.setenv("OCTAVO_RUNTIME_DIR", folder)
        secure = serve._access((None, None, None), (*pair, None), "here", 7)
    assert secure == keys.Access("here:7", tls=TlsFiles(*pair), local_socket=f"{folder}/frontend-7")
    plain = serve._access(([FIRST], None, [ADMIN]), (None, None, None), "here", 7)
    assert plain == keys.Access("here:7", ADMIN, needs_key=True)
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigurationError, match="too long"):
        serve._access((None, None, None), (*pair, None), "here", 7)


@pytest.mark.parametrize(
    ("tls", "needs_key", "flags", "grpcurl"),
    [
        (None, False, "", "-plaintext"),
        (TlsFiles(Path("c"), Path("k")), False, " --tls-ca CA.pem", "-cacert CA.pem"),
        (
            TlsFiles(Path("c"), Path("k"), Path("a")),
            True,
            " --tls-ca CA.pem --tls-cert CLIENT.pem --tls-key CLIENT.key",
            '-cacert CA.pem -cert CLIENT.pem -key CLIENT.key -H "authorization: Bearer $OCTAVO_API_KEY"',
        ),
    ],
)
def test_the_summary_says_what_clients_need(tls: TlsFiles | None, needs_key: bool, flags: str, grpcurl: str) -> None:
    access = keys.Access("here:1", needs_key=needs_key, tls=tls)
    assert (access.client_flags, access.grpcurl_flags) == (flags, grpcurl)


def test_a_client_sends_the_first_of_the_keys() -> None:
    with connected("127.0.0.1:1", f" {FIRST} {SECOND} ") as connection:
        assert connection.metadata == (("authorization", f"Bearer {FIRST}"),)
    for none in (None, "", "  "):
        with connected("127.0.0.1:1", none) as connection:
            assert connection.metadata == ()
    with (
        pytest.raises(ConfigurationError, match="printable ASCII") as refused,
        connected("127.0.0.1:1", "schlüssel-von-mir"),
    ):
        pass
    assert "von-mir" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "given", "words"),
    [
        ("ftp://here:1", (), "ftp://; there are http:// and https://"),
        ("http://here:1", ("ca",), "speaks no TLS"),
        ("here:1", ("cert",), "go together"),
        ("here:1", ("key",), "go together"),
        ("https://here:1", ("ca",), "ca cannot be read: No such file"),
    ],
)
def test_what_a_client_cannot_connect_with_is_refused(
    tmp_path: Path, address: str, given: tuple[str, ...], words: str
) -> None:
    files = {f"tls_{name}": tmp_path / name for name in given}
    with pytest.raises(ConfigurationError, match=words), connected(address, **files):  # type: ignore[arg-type]
        pass


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


def test_a_client_says_what_would_help() -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    handshake = Failed(unavailable, "failed to connect to all addresses: Tls handshake failed")
    assert "do not agree on TLS" in str(failure("here:1", handshake))
    broken = Failed(unavailable, "Socket closed")
    assert str(failure("here:1", broken)) == "UNAVAILABLE: Socket closed"
    refused = Failed(grpc.StatusCode.UNAUTHENTICATED, "a key is needed")
    assert str(failure("here:1", refused)).endswith("--api-key or OCTAVO_API_KEY gives the key")


class Recorder(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers every method with one empty message, and keeps what authorized it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | bytes | None]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        self.seen.append((method, dict(handler_call_details.invocation_metadata).get("authorization")))
        return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([b""]))


COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "GenerateStream": [("generate", "x"), ("chat", "x")],
    "GetStatus": [("status",)],
    "WatchStatus": [("status", "--watch")],
    "ResetPrefixCache": [("cache", "reset")],
}


@pytest.mark.parametrize("method", COMMANDS)
def test_every_command_speaks_tls_and_sends_its_key(method: str, pair: tuple[Path, Path], authority: Authority) -> None:
    recorder = Recorder()
    listener = grpc.server(ThreadPoolExecutor(1), handlers=[recorder])
    port = listener.add_secure_port("127.0.0.1:0", TlsFiles(*pair, authority.certificate).credentials())
    listener.start()
    certificate, key = authority.issue("client")
    flags = {"address": f"https://127.0.0.1:{port}", "tls-ca": authority.certificate, "tls-cert": certificate}
    words = [str(word) for name, value in (flags | {"tls-key": key}).items() for word in (f"--{name}", value)]
    try:
        for command in COMMANDS[method]:
            done = CliRunner().invoke(build(command[0]), [*command, *words], env={"OCTAVO_API_KEY": FIRST})
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    finally:
        listener.stop(None).wait()
    assert recorder.seen == [(method, f"Bearer {FIRST}")] * len(COMMANDS[method])
