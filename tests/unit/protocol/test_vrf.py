"""Of a key and an input there is one output, and its proof convinces of no other. RFC 9381's examples are vectors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import vrf
from protocol.errors import SignatureError
from protocol.identity import Identity

SEEDS = st.binary(min_size=32, max_size=32)
FEW = settings(max_examples=25)


def is_valid(key, alpha: bytes, proof: bytes) -> bool:
    try:
        vrf.verify(key, alpha, proof)
    except SignatureError:
        return False
    return True


@FEW
@given(SEEDS, st.binary(max_size=100), st.binary(max_size=100))
def test_a_proof_is_of_one_key_and_one_input(seed, alpha, other):
    identity = Identity(seed)
    proof = identity.prove(alpha)
    assert len(proof) == vrf.PROOF_BYTES and proof == identity.prove(alpha)
    assert is_valid(identity.key, alpha, proof)
    assert is_valid(identity.key, other, proof) is (other == alpha)
    assert not is_valid(Identity(bytes(b ^ 1 for b in seed)).key, alpha, proof)


@FEW
@given(SEEDS, st.integers(0, 8 * vrf.PROOF_BYTES - 1))
def test_no_changed_proof_is_valid(seed, bit):
    identity, changed = Identity(seed), bytearray(Identity(seed).prove(b"input"))
    changed[bit // 8] ^= 1 << bit % 8
    assert not is_valid(identity.key, b"input", bytes(changed))


@pytest.mark.parametrize("proof", [b"", bytes(80), b"\xff" * 80, bytes(79), bytes(81)])
def test_garbage_is_no_proof(proof):
    assert not is_valid(Identity(bytes(32)).key, b"input", proof)


def test_the_output_is_of_the_point_alone():
    """The rest of a proof is not unique: its owner could try nonces."""
    proof = Identity(bytes(32)).prove(b"input")
    assert vrf.output(proof) == vrf.output(proof[:32] + bytes(48)) != vrf.output(Identity(bytes(32)).prove(b"other"))
