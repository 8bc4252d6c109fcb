"""A page that answers little by little holds neither a command nor the end of its process."""

from __future__ import annotations

import threading
import urllib.request
from typing import Any

import pytest

from peer import log_client
from peer.coordinator_client import CoordinatorUnreachable


async def test_a_page_that_answers_too_slowly_is_given_up_and_holds_no_process(monkeypatch):
    release, readers = threading.Event(), list[threading.Thread]()

    def stalled(*_: Any, **__: Any) -> None:
        readers.append(threading.current_thread())
        release.wait()
        raise OSError("it is over")

    monkeypatch.setattr(urllib.request, "urlopen", stalled)
    monkeypatch.setattr(log_client, "ANSWER_SECONDS", 0.05)
    try:
        with pytest.raises(CoordinatorUnreachable, match="http://slow answers too slowly"):
            await log_client.fetch_url("http://slow/api/status", ())
        assert [reader.daemon for reader in readers] == [True]
    finally:
        release.set()
    readers[0].join()
