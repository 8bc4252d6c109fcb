"""`cairn peer key`: an owner can list a volunteer's key before the run begins."""

from __future__ import annotations

from click.testing import CliRunner

from cairn.main import main
from peer.keyfile import load


def test_the_public_key_is_printed_and_is_the_one_that_the_peer_joins_with(tmp_path):
    first, second = (CliRunner().invoke(main, ["peer", "key", "--home", str(tmp_path)]) for _ in range(2))
    assert first.exit_code == 0 and first.output == second.output
    identity = load(tmp_path / "identity.key")
    assert first.output == f"{identity.key.hex()}\n" and identity.seed.hex() not in first.output
