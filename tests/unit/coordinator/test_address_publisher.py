"""The record of the coordinator's address, and a second coordinator that publishes one too."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from coordinator.address_publisher import AddressPublisher
from protocol.ids import Digest, sha256
from protocol.invite import HostPort, Invite
from tests.support.coordinator_fakes import FakeSwarm, make_spec
from tests.support.specs import OWNER

SPEC = make_spec()


async def test_two_coordinators_with_one_key_name_each_other_once(caplog: pytest.LogCaptureFixture):
    swarm, clock = FakeSwarm(SPEC), [1000.0]
    here = Invite(SPEC.run_id, Digest(sha256(b"tls")), (HostPort("here.example", 7410),))
    there = replace(here, coordinators=(HostPort("there.example", 7410),))
    one, other = (AddressPublisher(OWNER, swarm, lambda i=i: i, lambda: clock[0]) for i in (here, there))
    with caplog.at_level(logging.ERROR):
        await other.announce()
        for _ in range(4):  # alone: it has moved here
            clock[0] += 30
            await one.announce()
        assert not caplog.records
        for _ in range(6):
            for publisher in (other, one):
                clock[0] += 15
                await publisher.announce()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "run's key is at here.example:7410" in said[0] and "there.example:7410" in said[1]
    assert [one.problem, other.problem] == said[::-1]
    for _ in range(2):  # the other has stopped
        clock[0] += 30
        await one.announce()
    assert not one.problem
