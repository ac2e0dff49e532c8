"""What a coordinator shows: the status page, metrics, probes by HTTP and by gRPC; and who may read them."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from certificates import Authority
from coordinator_builders import op
from coordinator_client import Crew
from error_codes import ends_with
from event_words import ATTACHED_AGAIN, EPOCH_BEGAN, IN_THE_CLEAR, PAGES_ARE_OPEN
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from horovod.base.errors import AccessCode, ClusterCode, SettingCode, code_of
from horovod.base.telemetry import Registry
from horovod.base.telemetry.http import link_of
from horovod.coordinator.core.world.membership import JobOverview, MemberOverview
from horovod.coordinator.pages import NO_ANSWER, Readiness, Shown, page_of, web_server
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.health import NOT_SERVING, SERVING
from horovod.coordinator.store import Entry, Guard, MemoryStore, StoreError
from horovod.protos.v1 import negotiation_pb2
from horovod.protos.v1.story_pb2 import StoryEntry

READERS = "a-token-of-readers"


def read(url: str, token: str | None = None, method: str = "GET", authority: str | None = None) -> tuple[int, str]:
    """authority: the file by which the server is known, for HTTPS."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers, method=method)
    tls = ssl.create_default_context(cafile=authority) if authority else None
    try:
        with urllib.request.urlopen(request, timeout=20, context=tls) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def value(metrics: str, name: str) -> float:
    return float(re.findall(rf"^{re.escape(name)} (.*)$", metrics, re.MULTILINE)[0])


@pytest.fixture
def shown() -> Iterator[tuple[EmbeddedCoordinator, str]]:
    with EmbeddedCoordinator(web_listen="127.0.0.1:0") as coordinator:
        yield coordinator, coordinator.web_address


def test_a_job_as_it_comes_and_goes(shown: tuple[EmbeddedCoordinator, str]) -> None:
    coordinator, url = shown
    with Crew(coordinator.address) as crew:
        first = crew.member("m0", job="<b>digits", size=2, rank=0, host="node-a", pid=41)
        first.event("progress")
        status, page = read(f"{url}/", coordinator.web_token)
        assert status == 200
        assert "&lt;b&gt;digits" in page
        assert "<b>digits" not in page
        assert "waiting for rank 1" in page
        assert (
            value(read(f"{url}/metrics", coordinator.web_token)[1], 'horovod_members{job="<b>digits",state="waiting"}')
            == 1
        )
        second = crew.member("m1", job="<b>digits", size=2, rank=1, host="node-b", pid=42)
        for member in (first, second):
            member.wait_for_world()
            member.settle()
        report = negotiation_pb2.RankReport(operations=7, bytes=1 << 20, waited_us=2_500_000)
        first.negotiate(op("w"))
        second.negotiate(op("w"))
        second.negotiation.send(negotiation_pb2.NegotiationMessage(epoch=second.world.epoch, report=report))
        second.announce(op("v", shape=(2,)))
        first.negotiation.send(
            negotiation_pb2.NegotiationMessage(epoch=1, report=negotiation_pb2.RankReport(waited_us=500_000))
        )
        first.announce(op("v", shape=(3,)))
        first.plans(1)
        assert first.negotiation.next().errors
        metrics = read(f"{url}/metrics", coordinator.web_token)[1]
        job = 'job="<b>digits"'
        assert value(metrics, "horovod_worlds") == 1
        assert value(metrics, f"horovod_epoch{{{job}}}") == 1
        assert value(metrics, f"horovod_world_size{{{job}}}") == 2
        assert value(metrics, f"horovod_newcomers{{{job}}}") == 0
        assert value(metrics, f"horovod_worlds_formed_total{{{job}}}") == 1
        assert value(metrics, f"horovod_forming_seconds_count{{{job}}}") == 1
        assert value(metrics, f"horovod_forming_seconds_sum{{{job}}}") > 0
        assert value(metrics, f'horovod_members{{{job},state="present"}}') == 2
        assert value(metrics, f"horovod_announcements_total{{{job}}}") == 4
        assert value(metrics, f"horovod_plans_total{{{job}}}") == 1
        assert value(metrics, f"horovod_disagreements_total{{{job}}}") == 1
        assert value(metrics, f'horovod_rank_operations_total{{{job},rank="1"}}') == 7
        assert value(metrics, f'horovod_rank_wait_seconds_total{{{job},rank="1"}}') == 2.5
        assert value(metrics, f'horovod_rank_lateness_seconds{{{job},rank="0"}}') == 2
        assert value(metrics, f'horovod_rank_lateness_seconds{{{job},rank="1"}}') == 0
        # The epoch and the world; who serves the job, and who serves agents; and whether the store takes writes.
        assert value(metrics, 'horovod_store_seconds_count{operation="put_if",result="ok"}') >= 5
        page = read(f"{url}/", coordinator.web_token)[1]
        assert "<td>node-b</td><td>42</td>" in page
        assert "<td>1,048,576</td><td>2.5</td>" in page
        assert f"World 1 {EPOCH_BEGAN} 2 members" in page
        second.leave()
        first.event("gone")
        assert "World 1: rank 1 (pid 42) on host node-b" in read(f"{url}/", coordinator.web_token)[1]
        stranger = crew.member("m2", job="", size=2)
        assert stranger.membership.next().HasField("refused")
        metrics = read(f"{url}/metrics", coordinator.web_token)[1]
        assert value(metrics, 'horovod_refusals_total{what="join"}') == 1
        assert f"horovod_members_lost_total{{{job}" not in metrics, "it left in order"
        assert 'rank="1"' not in metrics


def test_probes(shown: tuple[EmbeddedCoordinator, str]) -> None:
    coordinator, url = shown
    assert read(f"{url}/healthz") == (200, "ok\n")
    assert read(f"{url}/readyz") == (200, "ok\n")
    assert read(f"{url}/healthz", method="HEAD") == (200, "")
    assert read(f"{url}/healthz", method="POST")[0] == 405
    assert read(f"{url}/secret")[0] == 404
    with grpc.insecure_channel(coordinator.address) as channel:  # which knows no token
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", StringValue.SerializeToString, Int32Value.FromString
        )
        assert check(StringValue(), timeout=60).value == SERVING
        assert check(StringValue(value="horovod.v1.Membership"), timeout=60).value == SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            check(StringValue(value="other"), timeout=60)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch", StringValue.SerializeToString, Int32Value.FromString
        )
        watched = watch(StringValue(), timeout=60)
        assert next(watched).value == SERVING
        watched.cancel()


class BrokenStore(MemoryStore):
    broken = True

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        if self.broken:
            raise StoreError("gone")
        return await super().put_if(key, value, revision, lease, guard=guard)


def test_not_ready_while_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.coordinator.pages.KEEP_S", 0.0)

    async def look() -> None:
        store = BrokenStore()
        web = web_server(Shown(list, Registry(), Readiness(store), "127.0.0.1:1"), None)
        port = await web.start("127.0.0.1", 0)
        url = f"http://127.0.0.1:{port}"
        assert await asyncio.to_thread(read, f"{url}/readyz") == (503, f"{NO_ANSWER}\n")
        assert (await asyncio.to_thread(read, f"{url}/healthz"))[0] == 200
        assert f"[{ClusterCode.STORE_FAILED}]" in (await asyncio.to_thread(read, f"{url}/"))[1]
        store.broken = False
        assert (await asyncio.to_thread(read, f"{url}/readyz"))[0] == 200
        await web.stop()

    asyncio.run(look())
    assert NOT_SERVING != SERVING


def test_a_page_that_fails_is_a_status_and_hangs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Sequence[JobOverview]:
        raise KeyError("secret")

    async def obstacle() -> str:
        return ""

    async def look() -> None:
        web = web_server(Shown(fail, Registry(), obstacle, "127.0.0.1:1"), "right")
        url = f"http://127.0.0.1:{await web.start('127.0.0.1', 0)}"
        assert (await asyncio.to_thread(read, f"{url}/"))[0] == 401
        assert (await asyncio.to_thread(read, f"{url}/metrics", "wrong"))[0] == 401
        assert (await asyncio.to_thread(read, f"{url}/metrics", "right"))[0] == 200
        assert (await asyncio.to_thread(read, f"{url}/readyz"))[0] == 200
        assert await asyncio.to_thread(read, f"{url}/", "right") == (500, "Internal Server Error\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"x" * 40_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        idle = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        await web.stop()
        assert await idle[0].read() == b""
        idle[1].close()

    asyncio.run(look())
    assert "secret" in caplog.text


def test_a_large_job_has_a_readable_page() -> None:
    members = tuple(MemberOverview(rank, "h", rank, away=rank == 3) for rank in range(5000))
    entries = tuple(StoryEntry(at=number, sentence=f"<i>entry</i>\n{number}.") for number in range(64))
    page = page_of([JobOverview("j", 1, 5000, members, 0, "", story=entries)], "here", obstacle="")
    assert page.count("<tr>") == 513
    assert "and 4488 more" in page
    assert "<td>away</td>" in page
    assert page.count("<li>") == 12
    assert "<li>1970-01-01 00:01:03 &lt;i&gt;entry&lt;/i&gt;\\n63.</li>" in page


def test_the_program_shows_pages_and_logs_in_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--web-listen", ":0"]
    with subprocess.Popen(
        [*command, "--log-format", "json", "--log-level", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            lines: list[str] = []
            reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
            reader.start()
            web, link, token = process.stdout.readline().split()[-1].partition("/?token=")
            assert link
            assert read(f"{web}/metrics", token)[0] == 200
            address = process.stdout.readline().split()[-1]
            with Crew(address) as crew:
                crew.settled_world(2, "logged")
            assert read(f"{web}/readyz")[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            reader.join(60)
        finally:
            process.kill()
    found = [json.loads(line) for line in lines]
    attached = [line for line in found if ATTACHED_AGAIN in line["message"]]
    assert [(line["job"], line["epoch"], line["rank"]) for line in attached] == [("logged", 1, 0), ("logged", 1, 1)]
    formed = next(line for line in found if f"{EPOCH_BEGAN} 2 members" in line["message"])
    assert (formed["level"], formed["job"], formed["epoch"]) == ("info", "logged", 1)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--web-listen", "0.0.0.0:0"], ends_with(AccessCode.EXPOSED, "0.0.0.0:0", "--web-token-file")),
        (["--web-listen", "nonsense"], ends_with(SettingCode.INVALID_SETTING, "'nonsense'")),
        (["--web-listen", "0.0.0.0:0", "--web-token-file", "/nowhere/x"], "/nowhere/x"),
        (["--web-listen", ":0", "--web-tls"], ends_with(SettingCode.MISSING_SETTING, "--web-tls", "--tls-cert")),
    ],
)
def test_who_may_read_is_decided_before_anything_listens(arguments: list[str], pattern: str) -> None:
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2), done.stderr
    assert re.search(pattern, done.stderr)
    assert "listening" not in done.stdout


def test_an_embedded_one_shows_nothing_to_strangers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=ends_with(AccessCode.EXPOSED, "0.0.0.0:0")):
        EmbeddedCoordinator(web_listen="0.0.0.0:0").start()
    with pytest.raises(ValueError, match=ends_with(AccessCode.WEAK_TOKEN, "0.0.0.0:0", "7 characters")):
        EmbeddedCoordinator(web_listen="0.0.0.0:0", web_token="readers").start()
    with EmbeddedCoordinator(web_listen="0.0.0.0:0", web_token=READERS) as coordinator:
        url = coordinator.web_address.replace("0.0.0.0", "127.0.0.1")
        for page in ("/", "/metrics"):
            assert read(url + page)[0] == 401
            assert read(url + page, coordinator.token)[0] == 401, "the members' token is another one"
            assert read(url + page, READERS)[0] == 200
        assert read(f"{url}/healthz")[0] == 200
    assert IN_THE_CLEAR in caplog.text
    caplog.clear()
    with EmbeddedCoordinator(web_listen="0.0.0.0:0", insecure=True) as coordinator:
        assert read(coordinator.web_address.replace("0.0.0.0", "127.0.0.1"))[0] == 200
    assert PAGES_ARE_OPEN in caplog.text


def read_as_browser(url: str, host: str = "", cookie: str = "") -> tuple[int, str, str, str]:
    """Status, body, Location and Set-Cookie of one answer, which is not followed."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=20)
    try:
        headers = ({"Host": host} if host else {}) | ({"Cookie": cookie} if cookie else {})
        connection.request("GET", url.partition(parts.netloc)[2] or "/", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers["Location"], answer.headers["Set-Cookie"]
    finally:
        connection.close()


@pytest.mark.parametrize("given", [None, "read&ers=%41+"])
def test_a_browser_opens_the_link_once_and_shows_a_cookie_then(given: str | None) -> None:
    with EmbeddedCoordinator(web_listen="127.0.0.1:0", web_token=given) as coordinator:
        link, url, token = coordinator.web_link, coordinator.web_address, coordinator.web_token
        assert token
        if given is not None:
            assert (link, token) == (url, given), "what others know already is not printed"
            link = link_of(url, given)
        assert read_as_browser(url)[0] == 401
        status, body, location, cookie = read_as_browser(link)
        assert (status, body, location) == (303, "", "/")
        shown, *attributes = cookie.split("; ")
        assert token not in shown
        assert attributes == ["Path=/", "HttpOnly", "SameSite=Lax"]
        for page in ("/", "/metrics"):
            assert read_as_browser(url + page, cookie=f"_xsrf=1; {shown}; other=2")[0] == 200
            assert read_as_browser(url + page, cookie=shown[:-1])[0] == 401
            assert read_as_browser(url + page, cookie=shown.partition("=")[0])[0] == 401
        for wrong in ("/?token=", "/?token=%ff", f"/?token={token}x", f"/?x=1&token={token}", "/?token"):
            status, body, _, cookie = read_as_browser(url + wrong)
            assert (status, code_of(body.strip()), cookie) == (401, AccessCode.WRONG_TOKEN, None)


@pytest.mark.parametrize("insecure", [False, True])
def test_a_page_of_the_internet_reads_nothing_though_its_name_points_here(insecure: bool) -> None:
    """DNS rebinding: the browser takes the pages for those of the attacker's host, which it names."""
    with EmbeddedCoordinator(web_listen="localhost:0", insecure=insecure) as coordinator:
        link, port = coordinator.web_link, coordinator.web_address.rpartition(":")[2]
        assert coordinator.web_token is None if insecure else coordinator.web_token
        expected = 200 if insecure else 303
        for host in ("localhost", f"LOCALHOST.:{port}", f"127.0.0.1:{port}", "[::1]", "10.0.0.5:1"):
            assert read_as_browser(link, host)[0] == expected, host
        for host in (
            "attacker.example",
            f"attacker.example:{port}",
            "localhost.attacker.example",
            "127.0.0.1.x",
            "[x",
            ":",
        ):
            status, body, _, cookie = read_as_browser(link, host)
            assert (status, code_of(body.strip()), cookie) == (421, AccessCode.OTHER_HOST_NAME, None), host
        assert read_as_browser(f"{coordinator.web_address}/healthz", "any.example")[:2] == (200, "ok\n"), "for probes"


def test_pages_over_https_with_a_certificate_that_is_renewed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    with pytest.raises(ValueError, match=ends_with(SettingCode.MISSING_SETTING, "web_tls=True", "tls=")):
        EmbeddedCoordinator(web_listen="0.0.0.0:0", web_tls=True)
    tls = ours.server()
    with EmbeddedCoordinator(tls=tls, web_listen="0.0.0.0:0", web_token=READERS, web_tls=True) as coordinator:
        url = coordinator.web_address.replace("0.0.0.0", "127.0.0.1")
        by_name = url.replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        assert read(f"{url}/metrics", authority=ours.file)[0] == 401
        for address in (url, by_name):  # a client that gives an address as the server's name, and one with a name
            assert read(f"{address}/metrics", READERS, authority=ours.file)[0] == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            read(url, authority=other.file)
        assert IN_THE_CLEAR not in caplog.text
        renewed = other.issue("renewed", "127.0.0.1", "localhost")
        Path(tls.cert).write_bytes(Path(renewed.cert).read_bytes())
        assert read(f"{url}/healthz", authority=ours.file)[0] == 200, "the key is still the old one's"
        Path(tls.key).write_bytes(Path(renewed.key).read_bytes())
        for address in (url, by_name):
            assert read(f"{address}/healthz", authority=other.file)[0] == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            read(url, authority=ours.file)
