"""The sentences of processes that are not let in, or let nobody in, whole, with their codes."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from horovod.base.proofs import job_token
from horovod.base.settings import resolve
from horovod.base.tls import EXPIRED, NOT_YET_VALID, OTHER_NAME
from horovod.base.tokens import file_name, read_token
from horovod.worker.runtime import token
from horovod.worker.runtime.channel import explain
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.probe import Finding, judge
from horovod.worker.runtime.tls import ClientTls, explained, not_welcome
from horovod.worker.runtime.token import Credential, given_token


# -- tokens ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("with_token", "who"), [(True, "the token of this process"), (False, "this process, which has no token")]
)
def test_of_another_token(with_token: bool, who: str) -> None:
    assert explain(grpc.StatusCode.UNAUTHENTICATED, "No.", "h:1", with_token) == (
        f"The coordinator at h:1 refused {who}: No. Set HOROVOD_TOKEN to the token of its job. [wrong-token]"
    )


def test_of_files_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(FileNotFoundError) as missing:
        read_token(str(file))
    assert missing.value.strerror == (
        f"Can't read the token file {str(file)!r}: No such file or directory. [unusable-token]"
    )
    with pytest.raises(IsADirectoryError) as directory:
        read_token(str(tmp_path))
    assert directory.value.strerror == (
        f"Can't read the token file {str(tmp_path)!r}: it is a directory. [unusable-token]"
    )
    for content, state in (("", "is empty"), ("two words", "does not")):
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(StartError) as unusable:
            given_token(resolve({"HOROVOD_TOKEN_FILE": str(file)}))
        assert str(unusable.value) == (
            f"The token file {str(file)!r} (HOROVOD_TOKEN_FILE) must hold one line of ASCII text without spaces, 4096 "
            f"characters at most, but it {state}. [unusable-token]"
        )


def test_of_a_token_that_could_be_found_by_trying() -> None:
    with pytest.raises(ValueError, match="weak-token") as caught:
        job_token("short", "mine")
    assert str(caught.value) == (
        "The cluster's token has 5 characters, so the holder of a job's token could find it by trying. Use a random "
        "one of 16 or more, for example of `openssl rand -hex 32`. [weak-token]"
    )


def no_table(*_: object) -> set[int]:
    raise OSError("no table of sockets")


@pytest.mark.parametrize(
    ("given", "owners", "act", "sentence"),
    [
        (
            None,
            lambda *_: {4_000_000},
            Credential.metadata,
            (
                "The process that listens at 127.0.0.1:1 belongs to uid 4000000, but this process belongs to "
                f"{token._user(os.geteuid())}, "
                "and another user's coordinator could make it run any code. Choose another port for your own "
                "coordinator. To take part in the job of that one, give its token (HOROVOD_TOKEN or "
                "HOROVOD_TOKEN_FILE) and the authority of its certificate (HOROVOD_TLS_CA; `horovodrun certs` makes "
                "one). [other-user]"
            ),
        ),
        (
            "t",
            lambda *_: {4_000_000},
            Credential.metadata,
            (
                "The process that listens at 127.0.0.1:1 belongs to uid 4000000, but this process belongs to "
                f"{token._user(os.geteuid())}, "
                "and another user's coordinator could make it run any code. It was not sent the token of this "
                "process. Choose another port for your own coordinator. To take part in the job of that one, give its "
                "token (HOROVOD_TOKEN or HOROVOD_TOKEN_FILE) and the authority of its certificate (HOROVOD_TLS_CA; "
                "`horovodrun certs` makes one). [other-user]"
            ),
        ),
        (
            None,
            no_table,
            Credential.metadata,
            (
                "It can't be told whose process listens at 127.0.0.1:1 (no table of sockets), and a coordinator of "
                "another user could make this process do as it likes. Give its token (HOROVOD_TOKEN or "
                "HOROVOD_TOKEN_FILE) and the authority of its certificate (HOROVOD_TLS_CA; `horovodrun certs` makes "
                "one). [unknown-owner]"
            ),
        ),
        (
            "t",
            no_table,
            Credential.metadata,
            (
                "It can't be told whose process listens at 127.0.0.1:1 (no table of sockets), and a coordinator of "
                "another user could make this process do as it likes. Let it show a certificate (HOROVOD_TLS_CA). "
                "[unknown-owner]"
            ),
        ),
        (
            None,
            lambda *_: set(),
            Credential.confirm,
            (
                "It can't be told whose coordinator answers at 127.0.0.1:1: no process listens there that is "
                "seen from here. If the connection is forwarded, give the coordinator's token in "
                "HOROVOD_TOKEN or HOROVOD_TOKEN_FILE. [unknown-owner]"
            ),
        ),
        (
            "t",
            lambda *_: set(),
            Credential.confirm,
            (
                "It can't be told whose coordinator answers at 127.0.0.1:1: no process listens there that is "
                "seen from here. Start again. If other users could take that port, give the coordinator a "
                "certificate (HOROVOD_TLS_CA). [unknown-owner]"
            ),
        ),
    ],
)
def test_of_whose_coordinator_it_is(
    given: str | None,
    owners: Callable[..., set[int]],
    act: Callable[[Credential], Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token, "owners", owners)
    with pytest.raises(StartError) as caught:
        act(Credential("127.0.0.1:1", given))
    assert str(caught.value) == sentence


def test_of_a_file_that_others_could_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(token, "owners", lambda *_: {os.geteuid()})
    file = tmp_path / "horovod" / file_name("127.0.0.1", 1)
    file.parent.mkdir()
    file.write_text("token")
    file.chmod(0o644)
    with pytest.raises(StartError) as caught:
        Credential("127.0.0.1:1", None).metadata()
    assert str(caught.value) == (
        f"The coordinator's token in {str(file)!r} is not usable: expected a plain file that its owner alone can read "
        "and write (mode 0600). Remove it and start the coordinator again. [not-private]"
    )


# -- TLS ---------------------------------------------------------------------------------------------------------------
def of_a_certificate(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError()
    error.verify_code, error.verify_message = code, "as OpenSSL says it"
    return error


def of_the_protocol(reason: str) -> ssl.SSLError:
    error = ssl.SSLError()
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            of_a_certificate(EXPIRED),
            (
                "The coordinator at h:1 has a certificate that has expired. Renew it there; the coordinator takes new "
                "files without a restart. [untrusted-certificate]"
            ),
        ),
        (
            of_a_certificate(NOT_YET_VALID),
            (
                "The coordinator at h:1 has a certificate that is not valid yet. Check the clocks of both hosts. "
                "[untrusted-certificate]"
            ),
        ),
        (
            of_a_certificate(20),
            (
                "The coordinator at h:1 has a certificate that no authority in 'ca.pem' has signed. Set HOROVOD_TLS_CA "
                "to the certificate authority of this coordinator. [untrusted-certificate]"
            ),
        ),
        (
            of_a_certificate(OTHER_NAME),
            (
                "The coordinator at h:1 has a certificate that is not for 'h'. Use a name that is in it. If "
                "you can't change the address, put that name into HOROVOD_TLS_SERVER_NAME. "
                "[untrusted-certificate]"
            ),
        ),
        (
            of_the_protocol("WRONG_VERSION_NUMBER"),
            (
                "The coordinator at h:1 does not speak TLS. Start it with --tls-cert and --tls-key, or leave "
                "HOROVOD_TLS_CA out of the settings of this process. [tls-on-one-side]"
            ),
        ),
        (
            of_the_protocol("SOMETHING_ELSE"),
            (
                "The coordinator at h:1 ended the TLS handshake: SOMETHING_ELSE. Check HOROVOD_TLS_CA, "
                "HOROVOD_TLS_CERT and HOROVOD_TLS_KEY. [tls-handshake]"
            ),
        ),
    ],
)
def test_of_handshakes(error: ssl.SSLError, sentence: str) -> None:
    assert Finding(*explained(error, ClientTls("ca.pem"), "h")).sentence("h:1") == sentence


def test_of_a_certificate_that_is_asked_for() -> None:
    assert Finding(*not_welcome(ClientTls("ca.pem"))).sentence("h:1") == (
        "The coordinator at h:1 ended the connection after the TLS handshake, as one that asks for a certificate; this "
        "process has none. Set HOROVOD_TLS_CERT and HOROVOD_TLS_KEY to one that the authority of its --tls-client-ca "
        "has signed. [refused-certificate]"
    )


def test_of_a_coordinator_that_speaks_tls() -> None:
    assert judge(bytes.fromhex("150303000202460000")).sentence("h:1") == (
        "The coordinator at h:1 speaks TLS, which this process was not told to use. Set HOROVOD_TLS_CA to the file of "
        "the certificate authority by which that coordinator is known. [tls-on-one-side]"
    )


def test_of_files_of_certificates(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("nothing")
    for ca, sentence in (
        ("/nowhere.pem", "Can't read HOROVOD_TLS_CA='/nowhere.pem': No such file or directory. [unusable-certificate]"),
        (str(junk), f"HOROVOD_TLS_CA={str(junk)!r} holds no certificate in PEM. [unusable-certificate]"),
    ):
        with pytest.raises(StartError) as caught:
            ClientTls(ca).context()
        assert str(caught.value) == sentence
