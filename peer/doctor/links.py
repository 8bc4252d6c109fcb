"""The checks of the run's coordinator and members: are they there, and can this machine reach them? Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from peer.coordinator_client import RunInfo, SwarmStatus
from peer.doctor.findings import DoctorFinding
from peer.doctor.measurements import PresentSwarm

AWAY = ("silent", "gone", "banned", "barred")
"""Phases in a status of peers that are not there."""

MOST_TOKENS_PER_SECOND = 1e15
"""The coordinator may say more; it is not believed."""


def swarm_of(status: SwarmStatus) -> PresentSwarm:
    """Return the members that are there, by the coordinator's word."""
    speed = min(max(0.0, status.tokens_per_second), MOST_TOKENS_PER_SECOND)
    return PresentSwarm(sum(p.phase not in AWAY for p in status.peers), speed)


def run_finding(info: RunInfo, status: SwarmStatus) -> DoctorFinding:
    """Judge whether the run can be joined now."""
    if info.over:
        remedy = "there is nothing to train: `cairn peer join` would fetch the model"
        return DoctorFinding("run", "no", f"{info.spec.name} is over: {info.over}", remedy)
    found = f"{info.spec.name} is {status.health}: {status.message}"
    if info.last is not None or status.health == "paused":
        return DoctorFinding("run", "warning", found, "a peer that joins waits until its owner resumes it")
    return DoctorFinding("run", "ok", found)


def reach_finding(dialled: Mapping[str, bool], own: str) -> DoctorFinding:
    """Judge the connections by TCP to members. `own`: this machine's address on the way to the coordinator."""
    inbound = "no port has to be open here"
    if own and not ipaddress.ip_address(own).is_global:
        inbound += " (others cannot dial this machine, whose address is private; it dials them)"
    if not dialled:
        return DoctorFinding("members", "note", f"the coordinator names no address of a member; {inbound}")
    reached = sum(dialled.values())
    found = f"{reached} of {len(dialled)} addresses of members answer by TCP; {inbound}"
    if reached:
        return DoctorFinding("members", "ok", found)
    ports = sorted({address.split("/tcp/")[1].split("/")[0] for address in dialled})
    remedy = f"let outgoing TCP through (here to ports {', '.join(ports)}), or ask the owner whether the swarm is up"
    return DoctorFinding("members", "no", found, remedy)


def versions_finding(versions: Mapping[str, str]) -> DoctorFinding:
    """Tell the versions of what takes part."""
    return DoctorFinding("versions", "note", ", ".join(f"{name} {version}" for name, version in versions.items()))
