"""The identity on disk is made once, private, and never silently replaced."""

from __future__ import annotations

import logging
import os
import stat

import pytest

from peer.keyfile import load, load_or_make
from protocol.errors import IdentityError


def test_first_use_makes_a_private_key_and_later_uses_read_the_same(tmp_path):
    path = tmp_path / "deep" / "home" / "key"
    first = load_or_make(path)
    assert load_or_make(path).key == first.key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["key"]  # no draft is left


def test_two_homes_have_two_identities(tmp_path):
    assert load_or_make(tmp_path / "a").key != load_or_make(tmp_path / "b").key


def test_a_key_that_others_may_read_is_closed_to_them_and_the_user_is_told(tmp_path, caplog):
    path = tmp_path / "key"
    key = load_or_make(path).key
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert load_or_make(path).key == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "others could read" in caplog.text


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 200, b"x" * 100_000])
def test_a_damaged_key_is_an_error_with_a_remedy_and_stays_as_it_is(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="key file: restore it from a copy, or move it away"):
        load_or_make(path)
    with pytest.raises(IdentityError, match="key file: restore it from a copy, or name another file"):
        load(path)
    assert path.read_bytes() == content


def test_a_truncated_key_is_an_error(tmp_path):
    path = tmp_path / "key"
    load_or_make(path)
    path.write_bytes(path.read_bytes().replace(b"\n-----END", b"0\n-----END"))
    with pytest.raises(IdentityError, match="damaged"):
        load_or_make(path)


def test_a_folder_in_its_place_is_an_error_not_a_traceback(tmp_path):
    (tmp_path / "key").mkdir()
    with pytest.raises(IdentityError):
        load_or_make(tmp_path / "key")


def test_a_place_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="another file"):
        load_or_make(tmp_path / "file" / "key")


def test_losing_the_race_to_make_the_key_takes_the_winners(tmp_path, monkeypatch):
    path = tmp_path / "key"
    real_link = os.link
    winner = []

    def somebody_is_faster(source, target):
        monkeypatch.setattr(os, "link", real_link)
        winner.append(load_or_make(path).key)
        real_link(source, target)

    monkeypatch.setattr(os, "link", somebody_is_faster)
    assert load_or_make(path).key == winner[0]
