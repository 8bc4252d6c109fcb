"""The protocol's version: the remedy of an older and of a newer Cairn, and values that are no version."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rfc8785

from protocol import version
from protocol.envelope import seal
from protocol.errors import SpecError
from protocol.ids import RunId
from protocol.merkle import blob_digest
from protocol.spec import KIND, RunSpec, open_spec, parse_spec
from protocol.version import MAX_PROTOCOL, PROTOCOL, RELEASE, VersionError, mismatch
from tests.support.specs import OWNER, tiny_spec


def spec_bytes(**changes: Any) -> bytes:
    """Return a canonical spec with other fields at its top; None: without the field."""
    fields = json.loads(tiny_spec().canonical()) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    return rfc8785.dumps(kept)


def test_an_older_peer_is_told_to_upgrade_and_a_newer_one_which_release_to_install():
    assert mismatch(3, 3, "this peer", "") == ""
    assert mismatch(3, 2, "this peer", "0.3.0") == (
        "this run speaks protocol 3, and this peer speaks 2: run `cairn peer upgrade` (in a clone first `git pull`)"
    )
    assert mismatch(3, 4, "this peer", "0.3.0") == (
        "this run speaks protocol 3, and this peer speaks 4: in your clone `git checkout v0.3.0`, then "
        "`pipx install --force .`, or ask the run's owner"
    )
    assert "install an older Cairn, which speaks 3" in mismatch(3, 4, "this peer", "")


def test_a_spec_of_a_later_protocol_says_so_whatever_else_is_in_it():
    later = spec_bytes(version=PROTOCOL + 1, model="in a new form", new_table={"a": 1})
    with pytest.raises(VersionError, match=rf"protocol {PROTOCOL + 1}, .*Cairn {RELEASE} speaks {PROTOCOL}: run"):
        parse_spec(later)
    envelope = seal(OWNER, KIND, later).encoded
    with pytest.raises(VersionError):
        open_spec(envelope, RunId(blob_digest(later)))
    with pytest.raises(SpecError, match="is not that of run"):  # first of all it is the run's
        open_spec(envelope, tiny_spec().run_id)


def test_a_spec_of_an_earlier_protocol_names_the_last_release_that_spoke_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(version, "PROTOCOL", PROTOCOL + 1)
    monkeypatch.setitem(version.LAST_RELEASES, PROTOCOL, "0.1.7")
    with pytest.raises(VersionError, match=r"speaks 2: in your clone `git checkout v0\.1\.7`, then .* or ask"):
        parse_spec(spec_bytes())


@pytest.mark.parametrize(
    "stated", [None, 0, -1, MAX_PROTOCOL + 1, 2**53 - 1, 1e300, 1.5, "1", "2", True, False, [], {}], ids=repr
)
def test_what_is_no_version_is_refused_as_malformed(stated: Any):
    with pytest.raises(SpecError) as caught:
        parse_spec(spec_bytes(version=stated))
    assert not isinstance(caught.value, VersionError)


def test_each_earlier_protocol_has_its_last_release():
    assert set(version.LAST_RELEASES) == set(range(1, PROTOCOL))
    assert json.loads(tiny_spec().canonical())["version"] == RunSpec.model_fields["version"].default == PROTOCOL
