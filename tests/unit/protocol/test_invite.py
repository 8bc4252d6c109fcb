"""Invites: what is written is read back, and a bad paste gives one clear error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, RunId, b64url, sha256
from protocol.invite import PREFIX, HostPort, Invite, from_base58, to_base58

RUN, FINGERPRINT = RunId(bytes(range(32))), Digest(bytes(range(32, 64)))
KEY = Identity(bytes(32)).key
USUAL = f"/ip4/203.0.113.7/tcp/4001/p2p/{to_base58(KEY.libp2p_id)}"


def invite(**changes) -> Invite:
    fields = dict(
        run=RUN, fingerprint=FINGERPRINT, coordinators=(HostPort("203.0.113.7", 7100),), code="", addresses=()
    )
    return Invite(**(fields | changes))  # type: ignore[arg-type]


def test_an_invite_is_read_back_as_it_was_written():
    full = invite(
        coordinators=(HostPort("run.example.org", 7100), HostPort("2001:db8::1", 1)),
        code="quiet-otter-41",
        addresses=(USUAL, "/dns4/a.example.org/tcp/9/p2p/abc", f"/ip6/::1/tcp/1/p2p/{to_base58(KEY.libp2p_id)}"),
    )
    assert Invite.parse(str(full)) == full


def test_an_invite_for_one_coordinator_stays_short():
    assert len(str(invite())) <= 130
    assert len(str(invite(addresses=(USUAL,)))) <= 185


def test_a_peer_id_is_written_as_libp2p_writes_it():
    assert to_base58(KEY.libp2p_id).startswith("12D3KooW")
    assert from_base58(to_base58(KEY.libp2p_id)) == KEY.libp2p_id


def test_white_space_that_a_terminal_put_in_is_dropped():
    text = str(invite())
    assert Invite.parse(f"  {text[:40]}\n   {text[40:90]}\r\n{text[90:]}\n") == invite()


@given(st.data())
def test_a_cut_off_or_mistyped_paste_is_refused_and_says_so(data):
    text = str(invite(code="abc", addresses=(USUAL,)))
    cut = data.draw(st.integers(len(PREFIX), len(text) - 1))
    with pytest.raises(MalformedError, match="cut off or altered"):
        Invite.parse(text[:cut])
    at = data.draw(st.integers(len(PREFIX), len(text) - 1))
    other = data.draw(st.sampled_from("ABCDEFGHabcdefgh0123456789-_").filter(lambda c: c != text[at]))
    mistyped = text[:at] + other + text[at + 1 :]
    with pytest.raises(MalformedError, match="cut off or altered"):
        Invite.parse(mistyped)


@given(st.binary(max_size=300))
def test_any_bytes_with_a_good_checksum_end_in_an_invite_or_a_typed_error(body):
    try:
        parsed = Invite.parse(PREFIX + b64url(body + sha256(body)[:4]))
    except MalformedError:
        return
    assert Invite.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text, says",
    [("", "not an invite"), ("hello", "not an invite"),
     ("cairn2:abc", "another version"), ("cairn1:" + "A" * 5000, "too long"), ("x" * 100_000, "too long")],
)  # fmt: skip
def test_what_is_no_invite_is_named_so(text, says):
    with pytest.raises(MalformedError, match=says):
        Invite.parse(text)


@pytest.mark.parametrize(
    "changes",
    [{"coordinators": ()}, {"coordinators": (HostPort("a", 1),) * 5},
     {"code": "x" * 65}, {"code": "a b"}, {"code": "é"}, {"addresses": ("nope",)}, {"addresses": (USUAL,) * 9},
     {"addresses": ("/dns4/b\u00fccher.example/tcp/1",)}],
)  # fmt: skip
def test_what_does_not_fit_is_never_written(changes):
    with pytest.raises(MalformedError):
        invite(**changes)


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "a:x", "::1:5", "a b:1", "[zz]:1", "a:१",
                                  "run..example.org:1", "a.:1", "-a:1", "a" * 64 + ".org:1", "a.b-:1"])  # fmt: skip
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(MalformedError):
        HostPort.parse(text)
