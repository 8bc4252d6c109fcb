"""Inclusion and consistency proofs: those of RFC 9162's recursive definition, and nothing else verifies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import MalformedError
from protocol.ids import sha256
from protocol.merkle import leaf_hash, tree_hash
from protocol.proofs import (
    EMPTY,
    MAX_PROOF,
    MerkleFrontier,
    check_consistency,
    check_inclusion,
    completed_subtrees,
    consistency_proof,
    inclusion_proof,
    root_at,
)

LEAVES = [leaf_hash(b"%d" % i) for i in range(300)]
SIZES = st.integers(0, len(LEAVES))


# -- RFC 9162 as it is written there -------------------------------------------------------------------------------


def split(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def path(m: int, d: list[bytes]) -> list[bytes]:
    """Section 2.1.3.1."""
    if len(d) == 1:
        return []
    k = split(len(d))
    return path(m, d[:k]) + [tree_hash(d[k:])] if m < k else path(m - k, d[k:]) + [tree_hash(d[:k])]


def subproof(m: int, d: list[bytes], b: bool) -> list[bytes]:
    """Section 2.1.4.1."""
    if m == len(d):
        return [] if b else [tree_hash(d)]
    k = split(len(d))
    if m <= k:
        return [*subproof(m, d[:k], b), tree_hash(d[k:])]
    return [*subproof(m - k, d[k:], False), tree_hash(d[:k])]


# -- what the log does -----------------------------------------------------------------------------------------------


class Log:
    """Stores every complete subtree as the appender tells; counts how often it is asked."""

    def __init__(self, size: int):
        self.nodes: dict[tuple[int, int], bytes] = {}
        self.asked = 0
        appender = MerkleFrontier()
        for leaf in LEAVES[:size]:
            for done in appender.append(leaf):
                assert (done.level, done.index) not in self.nodes
                self.nodes[done.level, done.index] = done.hash
        self.root = appender.root()

    def node(self, level: int, index: int) -> bytes:
        self.asked += 1
        return self.nodes[level, index]


WHOLE = Log(len(LEAVES))


@given(SIZES)
def test_the_appender_keeps_the_tree(size: int):
    log = Log(size)
    assert log.root == tree_hash(LEAVES[:size]) == root_at(size, WHOLE.node)
    for (level, index), hash in log.nodes.items():
        assert hash == tree_hash(LEAVES[index << level : (index + 1) << level])
    assert len(log.nodes) < 2 * size or size == 0


@given(SIZES, SIZES)
def test_an_appender_goes_on_where_a_log_ends(a: int, b: int):
    appender = MerkleFrontier(min(a, b), WHOLE.node)
    for i in range(min(a, b), max(a, b)):
        assert appender.append(LEAVES[i]) == completed_subtrees(i, LEAVES[i], WHOLE.node)
    assert appender.size == max(a, b) and appender.root() == tree_hash(LEAVES[: max(a, b)])


def test_an_appender_in_the_middle_needs_the_nodes():
    with pytest.raises(ValueError, match="nodes"):
        MerkleFrontier(3)


@st.composite
def inclusions(draw: st.DrawFn) -> tuple[int, int]:
    size = draw(st.integers(1, len(LEAVES)))
    return draw(st.integers(0, size - 1)), size


@given(inclusions())
def test_an_inclusion_proof_is_the_rfcs_and_verifies(which: tuple[int, int]):
    index, size = which
    proof = inclusion_proof(index, size, WHOLE.node)
    assert list(proof) == path(index, LEAVES[:size])
    check_inclusion(LEAVES[index], index, size, proof, tree_hash(LEAVES[:size]))


@given(SIZES, SIZES)
def test_a_consistency_proof_is_the_rfcs_and_verifies(a: int, b: int):
    first, second = min(a, b), max(a, b)
    proof = consistency_proof(first, second, WHOLE.node)
    assert list(proof) == (subproof(first, LEAVES[:second], True) if first else [])
    check_consistency(first, tree_hash(LEAVES[:first]), second, tree_hash(LEAVES[:second]), proof)


def test_every_small_tree_has_every_proof():
    for second in range(1, 34):
        root = tree_hash(LEAVES[:second])
        for first in range(second + 1):
            check_consistency(
                first, tree_hash(LEAVES[:first]), second, root, consistency_proof(first, second, WHOLE.node)
            )
        for index in range(second):
            check_inclusion(LEAVES[index], index, second, inclusion_proof(index, second, WHOLE.node), root)


def test_a_proof_of_a_huge_log_asks_few_nodes():
    asked = []

    def node(level: int, index: int) -> bytes:
        asked.append((level, index))
        return sha256(b"%d %d" % (level, index))

    size = 2**40 - 1  # the most ragged there is
    assert len(inclusion_proof(2**39 + 12345, size, node)) <= MAX_PROOF and len(asked) <= 80
    asked.clear()
    assert len(consistency_proof(2**39 + 12345, size, node)) <= MAX_PROOF and len(asked) <= 80


# -- nothing else verifies --------------------------------------------------------------------------------------------


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    return bytes(changed)


@settings(max_examples=300)
@given(inclusions(), st.data())
def test_a_changed_inclusion_proof_never_verifies(which: tuple[int, int], data: st.DataObject):
    index, size = which
    leaf, proof, root = LEAVES[index], list(inclusion_proof(index, size, WHOLE.node)), tree_hash(LEAVES[:size])
    bit = data.draw(st.integers(0, 255))
    how = data.draw(st.sampled_from(["leaf", "root", "path", "cut", "longer", "swap", "index"]))
    root_sent: bytes = root
    if how == "leaf":
        leaf = flipped(leaf, bit)
    elif how == "root":
        root_sent = flipped(root, bit)
    elif how == "longer":
        proof.insert(data.draw(st.integers(0, len(proof))), data.draw(st.sampled_from([leaf, root, b"\0" * 32])))
    elif how == "index":
        other = data.draw(st.integers(-2, size + 2))
        if other == index:
            return
        index = other
    elif not proof:
        return
    else:
        at = data.draw(st.integers(0, len(proof) - 1))
        if how == "path":
            proof[at] = flipped(proof[at], bit)
        elif how == "cut":
            del proof[at]
        else:
            other = data.draw(st.integers(0, len(proof) - 1))
            if proof[at] == proof[other]:
                return
            proof[at], proof[other] = proof[other], proof[at]
    with pytest.raises(MalformedError):
        check_inclusion(leaf, index, size, proof, root_sent)


@settings(max_examples=300)
@given(SIZES, SIZES, st.data())
def test_a_changed_consistency_proof_never_verifies(a: int, b: int, data: st.DataObject):
    first, second = min(a, b), max(a, b)
    proof = list(consistency_proof(first, second, WHOLE.node))
    roots: list[bytes] = [tree_hash(LEAVES[:first]), tree_hash(LEAVES[:second])]
    bit = data.draw(st.integers(0, 255))
    how = data.draw(st.sampled_from(["first", "second", "path", "cut", "longer", "turned"]))
    if how == "first":
        roots[0] = flipped(roots[0], bit)
    elif how == "second":
        if first == 0 and second:
            return  # an empty log is a beginning of every other
        roots[1] = flipped(roots[1], bit)
    elif how == "longer":
        proof.insert(data.draw(st.integers(0, len(proof))), data.draw(st.sampled_from([*roots, b"\0" * 32])))
    elif how == "turned":
        if first == second:
            return
        first, second = second, first
        roots.reverse()
    elif not proof:
        return
    else:
        at = data.draw(st.integers(0, len(proof) - 1))
        if how == "path":
            proof[at] = flipped(proof[at], bit)
        else:
            del proof[at]
    with pytest.raises(MalformedError):
        check_consistency(first, roots[0], second, roots[1], proof)


def test_every_byte_of_a_proof_counts():
    for first, second in ((3, 7), (4, 7), (6, 8), (1, 300), (299, 300)):
        proof = consistency_proof(first, second, WHOLE.node)
        roots = (tree_hash(LEAVES[:first]), tree_hash(LEAVES[:second]))
        for at, hash in enumerate(proof):
            for byte in range(32):
                changed = [*proof[:at], flipped(hash, 8 * byte), *proof[at + 1 :]]
                with pytest.raises(MalformedError):
                    check_consistency(first, roots[0], second, roots[1], changed)


def test_a_rewritten_past_has_no_consistency_proof():
    other = [*LEAVES[:10], leaf_hash(b"forged"), *LEAVES[11:20]]
    appender, nodes = MerkleFrontier(), {}
    for leaf in other:
        nodes.update({(d.level, d.index): d.hash for d in appender.append(leaf)})
    proof = consistency_proof(12, 20, lambda level, index: nodes[level, index])
    with pytest.raises(MalformedError):
        check_consistency(12, tree_hash(LEAVES[:12]), 20, appender.root(), proof)


def test_what_has_no_proof_is_refused():
    for index, size in ((0, 0), (5, 5), (-1, 5), (2**53, 2**53 + 1)):
        with pytest.raises(MalformedError):
            inclusion_proof(index, size, WHOLE.node)
    for first, second in ((6, 5), (-1, 5)):
        with pytest.raises(MalformedError):
            consistency_proof(first, second, WHOLE.node)
    with pytest.raises(MalformedError):
        check_inclusion(LEAVES[0], 0, 2, [b"short"], EMPTY)
    with pytest.raises(MalformedError):
        check_inclusion(LEAVES[0], 0, 2, [LEAVES[1]] * (MAX_PROOF + 1), EMPTY)
