"""A page may neither hold a command or the end of its process, nor have it call other machines."""

from __future__ import annotations

import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from peer import log_client
from peer.coordinator_client import CoordinatorRefused, CoordinatorUnreachable


async def test_a_page_that_answers_too_slowly_is_given_up_and_holds_no_process(monkeypatch):
    release, readers = threading.Event(), list[threading.Thread]()

    def stalled(*_: Any, **__: Any) -> None:
        readers.append(threading.current_thread())
        release.wait()
        raise OSError("it is over")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", stalled)
    monkeypatch.setattr(log_client, "ANSWER_SECONDS", 0.05)
    try:
        with pytest.raises(CoordinatorUnreachable, match="http://slow answers too slowly"):
            await log_client.fetch_url("http://slow/api/status", ())
        assert [reader.daemon for reader in readers] == [True]
    finally:
        release.set()
    readers[0].join()


async def test_a_redirect_is_told_and_not_followed():
    asked = list[str]()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/inner")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(CoordinatorRefused, match="redirects to /inner: if you trust that address, give it"):
                await log_client.fetch_url(f"http://127.0.0.1:{server.server_port}/api/status", ())
        finally:
            server.shutdown()
    assert asked == ["/api/status"]
