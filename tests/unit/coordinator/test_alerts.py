"""Alerts end to end: what the coordinator sees, what a webhook receives over HTTP, what a restart and a liar change."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from click.testing import CliRunner

from cairn.main import main
from coordinator.alerts import watcher
from coordinator.alerts.config import AlertConfig, AlertConfigError, Webhook, load_config
from coordinator.alerts.tracker import AlertEvent, back_off
from coordinator.alerts.webhooks import WebhookError, payload, post, unlinked
from protocol.ids import Digest
from protocol.message_codec import KeySigner
from protocol.messages import Directive
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.coordinator_service import running, settled, web
from tests.support.specs import OWNER
from tests.support.waiting import until

SPEC = make_spec()
EVENT = AlertEvent("id", "loss", "fired", "the loss is 9.99", 1.0, 2.0)


class Receiver:
    """An HTTP server that keeps what is posted, and answers with the statuses it was given, then with 204."""

    def __init__(self, *statuses: int, headers: str = ""):
        self.statuses = list(statuses)
        self.headers = headers
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(e["name"], e["kind"]) for _, b in self.got for e in [json.loads(b)["cairn"]]]

    @asynccontextmanager
    async def there(self):
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?token=x"
        try:
            yield self
        finally:
            server.close()

    async def _take(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        assert first == "POST /hook?token=x HTTP/1.1"
        self.got.append((headers, body))
        status = self.statuses.pop(0) if self.statuses else 204
        writer.write(f"HTTP/1.1 {status} So\r\n{self.headers}Content-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async def hears(self, *expected: tuple[str, str]) -> None:
        await until(lambda: len(self.events) >= len(expected), f"{len(expected)} events are received")
        assert self.events == list(expected)


@pytest.fixture
def quick(monkeypatch):
    """Looks often; a disk with room; words count at once, also right after the start."""
    monkeypatch.setattr(watcher, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr("coordinator.alerts.rules.STARTUP_SECONDS", -1.0)
    usage = type("Usage", (), {"free": 10**12, "total": 2 * 10**12})
    monkeypatch.setattr("coordinator.service.disk_usage", lambda _: usage)
    return usage


async def test_a_real_spike_a_stall_and_a_full_disk_are_told_by_webhook_and_shown(tmp_path, quick):
    clock = [time.time()]
    swarm = FakeSwarm(SPEC)
    for n in range(4):
        swarm.beat(n)
    async with Receiver().there() as hook:
        config = AlertConfig((Webhook.parse(hook.url),), "secret")
        async with running(tmp_path, SPEC, swarm, now=lambda: clock[0], alerts=config) as (c, _), web(c) as get:

            async def rounds(*losses):
                for loss in losses:
                    clock[0] += 5
                    for n in range(4):
                        swarm.beat(n)
                    swarm.round({0: 600, 1: 700}, loss=loss)
                    await settled(c, len(swarm.chain.certificates))

            await rounds(*[4.0 - 0.01 * i for i in range(12)])
            await rounds(7.0, 7.5)
            await hook.hears(("loss", "fired"))

            async def alerts() -> list:
                return (await get.get("/api/status")).json()["alerts"]

            shown = await until(alerts, "the alert is shown", every=0.05)
            assert [a["name"] for a in shown] == ["loss"] and "7.50" in shown[0]["message"]
            assert 'cairn_alert{name="loss"} 1.0' in (await get.get("/metrics")).text
            await rounds(3.9, 3.9)
            await hook.hears(("loss", "fired"), ("loss", "resolved"))
            quick.free = 10**9
            await hook.hears(("loss", "fired"), ("loss", "resolved"), ("disk", "fired"))
            clock[0] += 500
            for n in range(4):
                swarm.beat(n)
            await hook.hears(("loss", "fired"), ("loss", "resolved"), ("disk", "fired"), ("stalled", "fired"))
            headers, body = hook.got[0]
            said = json.loads(body)
            assert (
                said["text"].startswith("ALERT tiny: loss: the loss is 7.50, and was 3.9")
                and c.page_url in said["text"]
            )
            assert said["content"] == said["text"] and said["allowed_mentions"] == {"parse": []}
            stamp = headers["x-cairn-timestamp"]
            signed = hmac.new(b"secret", stamp.encode() + b"." + body, "sha256").hexdigest()
            assert headers["x-cairn-signature"] == f"v1={signed}" and abs(int(stamp) - time.time()) < 600
        # It stops and starts again: no alert is sent twice, and the end of an alert meanwhile is sent.
        quick.free = 10**12
        swarm.round({0: 600, 1: 700}, loss=3.9)
        async with running(tmp_path, SPEC, swarm, now=lambda: clock[0], alerts=config):
            await until(lambda: len(hook.got) >= 6, "the end of both is received")
            assert sorted(hook.events[4:]) == [("disk", "resolved"), ("stalled", "resolved")]


async def test_a_clock_that_was_ahead_at_the_start_silences_no_alert(tmp_path):
    clock = [time.time() + 86_400]
    async with running(tmp_path, SPEC, now=lambda: clock[0], monotonic=time.monotonic) as (c, _):
        clock[0] -= 86_400
        assert 0 <= c.alert_input().up < 3600


async def test_a_clock_that_is_set_makes_no_round_late_and_none_early(tmp_path):
    clock, passed = [time.time()], [0.0]
    async with running(tmp_path, SPEC, now=lambda: clock[0], monotonic=lambda: passed[0]) as (c, swarm):

        def health_after(seconds: float, set_by: float) -> str:
            clock[0] += seconds + set_by
            passed[0] += seconds
            swarm.beat(0)
            return c.overview().health

        await until(lambda: c.indexer.caught_up, "the coordinator has read the chain")
        assert [health_after(1, 0), health_after(1, 86_400)] == ["healthy"] * 2
        assert [health_after(1, -86_400), health_after(4000, 0)] == ["healthy", "stalled"]


@pytest.mark.parametrize("order", ["paused", "ended"])
async def test_a_run_that_rests_by_its_owners_word_raises_no_alert(tmp_path, quick, order, monkeypatch):
    made: list[watcher.AlertWatcher] = []

    def watch(*given) -> watcher.AlertWatcher:
        made.append(watcher.AlertWatcher(*given))
        return made[-1]

    monkeypatch.setattr("coordinator.service.AlertWatcher", watch)
    clock = [time.time()]
    swarm = FakeSwarm(SPEC)
    async with running(tmp_path, SPEC, swarm, now=lambda: clock[0]) as (c, _):
        for _ in range(3):
            clock[0] += 100
            for n in range(6):
                swarm.beat(n)
            swarm.round({0: 600, 1: 700})
            await settled(c, len(swarm.chain.certificates))
            await made[0].check()
        await c.control.accept(KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, run_status=order)).encoded)
        for _ in range(60):
            clock[0] += 100
            for n in range(6):
                swarm.beat(n, phase="paused" if order == "paused" else "leaving")
            await asyncio.sleep(0.03)  # a finalization is signed
            await made[0].check()
            assert made[0].active == ()
        assert c.overview().health == order


async def test_a_peer_with_another_state_than_the_chain_is_named(tmp_path):
    swarm = FakeSwarm(SPEC)
    wrong = Digest(bytes(31) + b"x")
    async with running(tmp_path, SPEC, swarm) as (c, _):
        for _ in range(3):
            swarm.round({0: 600, 1: 700})
        await settled(c, 3)
        before = swarm.chain.certificates[-1].record.body.parent  # the record before the head: its child names a state

        async def diverged(count: int) -> None:
            """Wait for the next overview: one is kept for a moment."""
            before = c.overview()
            await until(lambda: c.overview() is not before)
            assert len(c.overview().diverged) == count

        swarm.beat(0, head=before, round=2, state=state(2))
        await diverged(0)
        swarm.beat(1, head=before, round=2, state=wrong)
        await diverged(1)
        assert c.overview().diverged == (peer(1).key.short,)
        swarm.beat(1, head=before, round=2, state=None)
        await diverged(0)
        # At the head nobody names it yet: most of those who hold one are believed; of two there are no most.
        swarm.beat(0, state=state(3))
        swarm.beat(1, state=wrong)
        await diverged(0)
        swarm.beat(2, state=state(3))
        await diverged(1)
        swarm.beat(1, state=wrong, phase="syncing")
        await diverged(0)


async def test_a_webhook_that_fails_is_asked_again_and_one_that_never_will_is_not(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(watcher, "back_off", lambda n: back_off(n) / 100)
    quick.free = 10**9
    results = []
    async with Receiver(500, 429).there() as slow, Receiver(404).there() as gone:
        config = AlertConfig((Webhook.parse(slow.url), Webhook.parse(gone.url)))
        monkeypatch.setattr("coordinator.metrics.Metrics.delivered", lambda _, result: results.append(result))
        async with running(tmp_path, SPEC, alerts=config):
            await slow.hears(*[("disk", "fired")] * 3)
            await gone.hears(("disk", "fired"))
            quick.free = 10**12
            await gone.hears(("disk", "fired"), ("disk", "resolved"))
            await slow.hears(*[("disk", "fired")] * 3, ("disk", "resolved"))
            await until(lambda: len(results) == 6, "every answer is counted")
    assert sorted(results) == ["delivered"] * 3 + ["dropped"] + ["failed"] * 2


async def test_a_fault_of_our_own_does_not_silence_a_webhook(tmp_path, quick, monkeypatch, caplog):
    monkeypatch.setattr(watcher, "back_off", lambda n: back_off(n) / 100)
    quick.free = 10**9

    async def faulty(*asked):
        monkeypatch.setattr(watcher, "post", post)
        raise RuntimeError("a fault")

    monkeypatch.setattr(watcher, "post", faulty)
    async with Receiver().there() as hook, running(tmp_path, SPEC, alerts=AlertConfig((Webhook.parse(hook.url),))):
        await hook.hears(("disk", "fired"))
    assert "a fault of the coordinator" in caplog.text


async def test_an_event_that_no_one_took_is_told_after_a_restart(tmp_path, quick):
    quick.free = 10**9
    async with Receiver(500).there() as hook:
        config = AlertConfig((Webhook.parse(hook.url),))
        async with running(tmp_path, SPEC, alerts=config):
            await hook.hears(("disk", "fired"))
        assert (tmp_path / watcher.FILE).stat().st_mode & 0o077 == 0
        assert "token" not in (tmp_path / watcher.FILE).read_text()  # anybody with the address may post
        async with running(tmp_path, SPEC, alerts=config):
            await hook.hears(("disk", "fired"), ("disk", "fired"))
        (one, two) = (json.loads(b)["cairn"]["id"] for _, b in hook.got)
        assert one == two


async def test_a_damaged_journal_is_said_and_stops_nothing(tmp_path, quick, caplog):
    for damage in ("{", '{"form": 1, "rules": {"loss": {"x": 1}}, "waiting": {}}', '{"form": 1}', "[]"):
        (tmp_path / watcher.FILE).write_text(damage)
        async with running(tmp_path, SPEC):
            pass
    assert "sent again" in caplog.text


async def test_a_redirect_is_not_followed():
    async with Receiver().there() as inside, Receiver(302, headers="Location: " + inside.url + "\r\n").there() as hook:
        with pytest.raises(WebhookError, match="not followed") as e:
            await post(Webhook.parse(hook.url), payload(EVENT, "run", ""))
        assert e.value.final and not inside.got


async def test_silence_noise_and_nobody_are_errors_that_may_pass():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async def noise(reader, writer):
        writer.write(b"x" * 100_000 + b"\r\n\r\n")
        writer.close()

    async def endless(reader, writer):
        writer.write(b"HTTP/1.1 500 So\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"3e8\r\n" + b"y" * 1000 + b"\r\n")
            await writer.drain()

    cases = (silent, "did not answer within"), (noise, "could not be reached"), (endless, "answered with status 500")
    for what, says in cases:
        server = await asyncio.start_server(what, "127.0.0.1", 0)
        hook = Webhook.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hidden")
        with pytest.raises(WebhookError, match=says) as e:
            await post(hook, b"{}", deadline=0.3)
        assert not e.value.final and "hidden" not in str(e.value)
        server.close()
    with pytest.raises(WebhookError, match="could not be reached"):
        await post(Webhook.parse("http://127.0.0.1:1/"), b"{}")


async def test_no_text_of_the_http_library_is_repeated(monkeypatch):
    """It has the whole address, which is a secret, when a server hangs up before it has the body."""

    def refuse(*_: object, **__: object):
        raise aiohttp.ClientOSError(None, "Can not write request body for http://h/hidden")

    monkeypatch.setattr(aiohttp.ClientSession, "post", refuse)
    with pytest.raises(WebhookError, match="it hung up") as e:
        await post(Webhook.parse("http://h/hidden"), b"{}")
    assert "hidden" not in str(e.value)


def test_what_strangers_chose_makes_no_links_mentions_or_markup():
    event = replace(EVENT, message="<!channel> @everyone [x](http://evil) *b* `c` &lt; \x1b[2J\n" + "x" * 1000)
    text = json.loads(payload(event, "run", "http://page/"))["text"]
    assert not set("<>@*`&[]\n\x1b") & set(text) and len(text) < 700
    assert unlinked("ada 3.1, 5%") == "ada 3.1, 5%"
    assert unlinked("https://evil.example WWW.evil.example") == "https'evil.example 'evil.example"


def test_the_configuration_is_read_strictly(tmp_path, monkeypatch):
    assert load_config(tmp_path) == AlertConfig()
    path = tmp_path / "alerts.toml"
    path.write_text('[alerts]\nwebhooks = ["https://chat.example/a"]\nsecret = "s"\nrepeat_hours = 1')
    config = load_config(tmp_path, ["http://other.example:8080/b", "https://chat.example/a"])
    assert [str(h) for h in config.hooks] == ["other.example", "chat.example"]
    assert (config.secret, config.repeat) == ("s", 3600.0)
    monkeypatch.setenv("CAIRN_WEBHOOK_SECRET", "from outside")
    assert load_config(None, ["http://a.example/"]).secret == "from outside"
    for bad in (
        "",
        "[alerts]\nhooks = []",
        "alerts = 3",
        '[alerts]\nwebhooks = "x"',
        "[alerts]\nrepeat_hours = 0",
        "[alerts]\nrepeat_hours = nan",
        '[alerts]\nsecret = ["x"]',
        "[",
    ):
        path.write_text(bad)
        with pytest.raises(AlertConfigError, match="alerts.toml") as e:
            load_config(tmp_path)
        assert "'x" not in str(e.value)  # an address or the secret
    for bad in ("ftp://x/", "https://", "https://u:p@x/", "http://x:99999/", "http://x/ y", "http://[::1/", "x"):
        with pytest.raises(AlertConfigError):
            Webhook.parse(bad)


async def test_the_command_posts_a_test_event_and_says_who_did_not_take_it(tmp_path):
    def call(*args: str):
        return CliRunner().invoke(main, ["coordinator", "test-alert", *args], env={"CAIRN_HOME": str(tmp_path)})

    async with Receiver().there() as hook, Receiver(404).there() as gone:
        done = await asyncio.to_thread(call, "--webhook", hook.url)
        assert done.exit_code == 0 and "127.0.0.1: accepted" in done.output and hook.events == [("test", "test")]
        done = await asyncio.to_thread(call, "--webhook", hook.url, "--webhook", gone.url)
        assert done.exit_code == 1 and "404" in done.output and "1 of 2 webhooks" in done.output
    done = await asyncio.to_thread(call)
    assert done.exit_code == 1 and "give --webhook URL" in done.output
