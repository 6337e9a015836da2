"""Keys: which are right, whose they are, and what may not be one."""

import hashlib
import hmac
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend import auth
from octavo.frontend.auth import Authenticator, KeysError
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Unauthenticated
from octavo.frontend.metadata import read_authorization

KEYS = ("a-key-of-sixteen", "another-key-of-some-length", "third-key-0123456789")
ADMIN = "key-of-an-operator"


def bearer(key: str) -> str:
    return f"Bearer {key}"


def key_file(folder: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def test_without_keys_everybody_passes_and_is_nobody() -> None:
    nobody = Authenticator.from_sources()
    assert not nobody.needs_key
    assert not nobody.needs_admin_key
    for authorization in (None, "", "nonsense", bearer(KEYS[0])):
        assert nobody.check(authorization) is None
        assert nobody.check_admin(authorization) is None
        assert nobody.identity(authorization) is None


@pytest.mark.parametrize("key", KEYS)
def test_a_right_key_tells_whose_call_it_is(key: str) -> None:
    known = Authenticator.from_sources(KEYS)
    expected = f"key:{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    assert known.check(bearer(key)) == expected
    assert known.check(f"bEARER {key} ") == expected
    assert known.identity(bearer(key)) == expected
    assert key not in expected


@pytest.mark.parametrize(
    ("authorization", "words"),
    [
        (None, "is needed"),
        ("", "must be 'Bearer KEY'"),
        ("Bearer", "must be 'Bearer KEY'"),
        ("Bearer  ", "must be 'Bearer KEY'"),
        (KEYS[0], "must be 'Bearer KEY'"),
        (f"Basic {KEYS[0]}", "must be 'Bearer KEY'"),
        (f"Bearer {KEYS[0][:-1]}", "is not"),
        (f"Bearer {KEYS[0]}x", "is not"),
        (f"Bearer {KEYS[0].upper()}", "is not"),
        (f"Bearer {KEYS[0]} {KEYS[1]}", "is not"),
        (f"Bearer {KEYS[0]}, Bearer {KEYS[1]}", "is not"),
        ("Bearer \ud800é", "is not"),
        ("Bearer " + "x" * 100_000, "is not"),
    ],
)
def test_what_is_no_right_key_is_refused_and_not_repeated(authorization: str | None, words: str) -> None:
    known = Authenticator.from_sources(KEYS)
    with pytest.raises(Unauthenticated, match=words) as refused:
        known.check(authorization)
    assert KEYS[0][:-1].lower() not in str(refused.value).lower()
    assert len(str(refused.value)) < 100


@pytest.mark.parametrize("key", [*KEYS, "a-wrong-key-of-16"])
def test_a_key_is_compared_with_all_in_constant_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Authenticator.from_sources(KEYS)
    compared: list[tuple[Any, Any]] = []
    compare = hmac.compare_digest

    def counting(left: Any, right: Any) -> bool:
        compared.append((left, right))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    if key in KEYS:
        known.check(bearer(key))
    else:
        with pytest.raises(Unauthenticated):
            known.check(bearer(key))
    assert {left for left, _ in compared} == {hashlib.sha256(key.encode()).digest()}
    assert sorted(right for _, right in compared) == sorted(hashlib.sha256(k.encode()).digest() for k in KEYS)


def test_the_administration_takes_its_own_keys_alone() -> None:
    known = Authenticator.from_sources(KEYS, None, [ADMIN])
    assert known.check_admin(bearer(ADMIN))
    assert known.check(bearer(ADMIN)) == known.check_admin(bearer(ADMIN))
    with pytest.raises(Unauthenticated, match="administration"):
        known.check_admin(bearer(KEYS[0]))
    with pytest.raises(Unauthenticated):
        known.check_admin(None)


def test_without_a_key_of_its_own_the_administration_takes_any() -> None:
    known = Authenticator.from_sources(KEYS)
    assert known.check_admin(bearer(KEYS[1])) == known.check(bearer(KEYS[1]))
    with pytest.raises(Unauthenticated, match=r"^a key of this service is needed"):
        known.check_admin(None)


def test_a_key_of_the_administration_closes_nothing_else() -> None:
    known = Authenticator.from_sources(admin_keys=[ADMIN])
    assert not known.needs_key
    assert known.needs_admin_key
    assert known.check(None) is None
    assert known.identity(bearer(ADMIN)) is None
    with pytest.raises(Unauthenticated):
        known.check_admin(None)


def test_nothing_shows_a_key() -> None:
    known = Authenticator.from_sources(KEYS, None, [ADMIN])
    config = FrontendConfig(Path("model"), ("name",), "ipc:///x", auth=known)
    for shown in (repr(known), repr(config), str(vars(known))):
        assert not [key for key in (*KEYS, ADMIN) if key in shown]


def test_a_file_has_a_key_a_line(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"# of ours\n{KEYS[0]}\n\n  {KEYS[1]}  \r\n   # not-a-key-but-words\n{KEYS[0]}", 0o640)
    assert auth.read_keys([KEYS[2]], path) == (KEYS[2], KEYS[0], KEYS[1])
    known = Authenticator.from_sources([], path)
    assert known.check(bearer(KEYS[1]))
    with pytest.raises(Unauthenticated):
        known.check(bearer("# not-a-key-but-words"))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, KEYS[0], mode)
    with pytest.raises(KeysError, match=rf"{path} has mode {mode:04o}.*chmod o-rwx"):
        Authenticator.from_sources([], path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        (f"{KEYS[0]}\nsecret-short\n", "line 2 of .* has 12 characters: it must have from 16 to 512"),
        ("y" * 513, "line 1 of .* has 513 characters"),
        (f"{KEYS[0]} {KEYS[1]}", "line 1 of .* without spaces"),
        (f"{KEYS[0]}\x07", "line 1 of .* printable"),
        (f"{KEYS[0]}\n{KEYS[1]}é".encode("latin-1"), "line 2 of the key file .* is not ASCII"),
        ("#" * (2**20 + 1), "has 1048577 bytes, limit 1048576"),
        ("".join(f"key-number-{number:06}\n" for number in range(10_001)), "there are 10001 keys, limit 10000"),
    ],
    ids=["empty", "comments", "short", "long", "spaces", "control", "not-ascii", "large", "many"],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_keys(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    path = key_file(tmp_path, content)
    with pytest.raises(KeysError, match=words) as refused:
        Authenticator.from_sources([], path)
    assert not [key for key in (*KEYS, "secret-short", "yyyy") if key in str(refused.value)]


def test_the_most_keys_fit(tmp_path: Path) -> None:
    keys = [f"key-number-{number:06}" for number in range(10_000)]
    known = Authenticator.from_sources([], key_file(tmp_path, "\n".join(keys)))
    assert known.check(bearer(keys[-1]))


def test_a_file_that_is_absent_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"absent cannot be read: No such file"):
        Authenticator.from_sources([], tmp_path / "absent")
    with pytest.raises(KeysError, match=r"no regular file"):
        Authenticator.from_sources([], tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(KeysError, match=r"no regular file"):
        Authenticator.from_sources([], pipe)


def test_a_key_that_is_none_is_refused_by_its_place() -> None:
    with pytest.raises(KeysError, match="key 2 of 2 has 6 characters") as refused:
        Authenticator.from_sources([KEYS[0], "secret"])
    assert "secret" not in str(refused.value)
    with pytest.raises(KeysError, match="key 1 of 1 has 0 characters"):
        Authenticator.from_sources([], None, [""])


def test_several_authorizations_are_no_key() -> None:
    known = Authenticator.from_sources(KEYS)
    one = ("authorization", bearer(KEYS[0]))
    assert known.check(read_authorization([("x-request-id", "r"), one]))
    assert read_authorization([("other", "x")]) is None
    assert read_authorization(None) is None
    with pytest.raises(Unauthenticated):
        known.check(read_authorization([one, one]))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_on_this_machine_alone_nothing_is_exposed(host: str) -> None:
    assert auth.exposure(host, Authenticator(), has_tls=False) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "some.host"])
def test_a_service_for_others_without_keys_or_tls_is_told_of(host: str) -> None:
    assert f"everybody who reaches {host} may call" in auth.exposure(host, Authenticator(), has_tls=True)
    assert "in the clear" in auth.exposure(host, Authenticator(KEYS), has_tls=False)
    assert auth.exposure(host, Authenticator(KEYS), has_tls=True) == ""
