"""A proof of work is for one key and one run."""

from __future__ import annotations

from protocol.ids import PeerKey, RunId
from protocol.proof_of_work import find_proof, is_proof

RUN, KEY = RunId(bytes(32)), PeerKey(b"k" * 32)


def test_a_proof_that_was_found_is_one_for_this_key_in_this_run_alone():
    nonce = find_proof(RUN, KEY, 6, range(1000, 5000))
    assert nonce is not None and is_proof(RUN, KEY, nonce, 6)
    assert find_proof(RUN, KEY, 6, range(1000, nonce)) is None
    others = [is_proof(RUN, PeerKey(bytes([i]) * 32), nonce, 6) for i in range(40)]
    others += [is_proof(RunId(bytes([i]) * 32), KEY, nonce, 6) for i in range(1, 40)]
    assert sum(others) <= 6  # 1.2 by chance


def test_every_nonce_can_be_tried_and_no_bits_ask_for_nothing():
    assert is_proof(RUN, KEY, 2**64 - 1, 0) and is_proof(RUN, KEY, 0, 0)
