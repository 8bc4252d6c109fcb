"""The lines that tell a volunteer what others see, and the home of a peer that is anonymous."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.visibility import peer_home, seen_by_others, seen_in_a_line
from protocol.errors import CairnError
from protocol.ids import RunId

RUN, OTHER = RunId(b"r" * 32), RunId(b"o" * 32)


@pytest.mark.parametrize("anonymous", [False, True])
def test_key_name_device_and_address_are_named_with_those_who_see_them(anonymous: bool, tmp_path: Path):
    lines = seen_by_others("" if anonymous else "ada", anonymous=anonymous, home=Path("~/.cairn"))
    assert [line.split()[0] for line in lines[1:5]] == ["key", "name", "device", "address"]
    assert len(lines) == 6 and max(map(len, lines)) <= 80
    assert ('"ada"' in lines[2]) == ("NVIDIA" in lines[3]) == (not anonymous)
    assert all(word in seen_in_a_line() for word in ("key", "kind of device", "IP address", "whoever has an invite"))


def test_an_anonymous_peer_has_a_home_and_so_a_key_for_each_run(tmp_path: Path):
    first, second = (peer_home(tmp_path, run, anonymous=True) for run in (RUN, OTHER))
    assert len({first, second, tmp_path, peer_home(tmp_path, RUN, anonymous=False)}) == 3


def test_who_was_anonymous_in_a_run_does_not_join_it_openly_by_mistake(tmp_path: Path):
    own = peer_home(tmp_path, RUN, anonymous=True)
    own.mkdir(parents=True)
    assert peer_home(tmp_path, RUN, anonymous=True) == own
    with pytest.raises(CairnError, match=f"add --anonymous.*move {own} away"):
        peer_home(tmp_path, RUN, anonymous=False)
    assert peer_home(tmp_path, OTHER, anonymous=False) == tmp_path
