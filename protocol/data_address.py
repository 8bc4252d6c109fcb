"""The addresses of data that a spec may name, and those that a volunteer's machine may connect to for it.

They are written by a run's owner, whom a volunteer need not trust. So the form of an address is strict. Nothing starts
other code (fsspec's chained and code-loading file systems). Nothing turns the name of the requested file into something
else (a query, a fragment, a user name, a percent code that a server might read as one). The volunteer's own disk and
network, and the clouds that its accounts open, are private: only the volunteer may allow them.
"""

from __future__ import annotations

import ipaddress
import re

from protocol.errors import SpecError
from protocol.plain_text import is_plain

_CODE = r"%(?!2[ef35]|3f|5c|[01]|7f)[0-9a-f]{2}"  # no code of . / # % ? \ or of a control character
_PATH = rf"(?P<path>(?:/(?:[\w.~!$&'()*+,;=-]|(?i:{_CODE}))*)*)"
_WEB = rf"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{{1,5}}))?{_PATH}"
_BUCKET = rf"(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*){_PATH}"
_FORMS = {
    "file": r"(?!.*::)[^?#@]+",
    "http": _WEB,
    "https": _WEB,
    "s3": _BUCKET,
    "gs": _BUCKET,
    "gcs": _BUCKET,
    "az": _BUCKET,
    "abfs": _BUCKET,
    "hf": rf"(?P<repository>(?:datasets/)?[\w.-]+/[\w.-]+){_PATH}",
}
"""The form of the rest after `PROTOCOL://`. An address without `://` is a folder on the reader's own disk."""

WEB_PORTS = frozenset((80, 443, *range(1024, 65_536)))
"""Ports that may be named: other services than the web's, such as mail, are below 1024."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/3", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
        "168.63.129.16/32",  # Azure's metadata service
    )
)  # fmt: skip
"""The addresses of IPv4, and unicast ones of IPv6, that are not of the public internet: IANA's registries of special
purposes. The answers of Python's `ipaddress` differ from version to version."""


def check_address(address: str) -> str:
    """Return the address's protocol. Raises SpecError for what a peer would not open."""
    return _parse(address)[0]


def public_url(address: str) -> str | None:
    """Return the web address of a folder that anybody can read without an account; None for any other folder.

    Raises SpecError for what a peer would not open.
    """
    protocol, found = _parse(address)
    if protocol in ("http", "https"):
        return address
    if protocol == "s3" and "." not in found["bucket"]:  # Amazon's TLS certificate is not for a name with dots
        return f"https://{found['bucket']}.s3.amazonaws.com{found['path']}"
    if protocol in ("gs", "gcs"):
        return f"https://storage.googleapis.com/{found['bucket']}{found['path']}"
    if protocol == "hf":
        return f"https://huggingface.co/{found['repository']}/resolve/main{found['path']}"
    return None


def _parse(address: str) -> tuple[str, re.Match[str]]:
    protocol, _, remaining = address.partition("://") if "://" in address else ("file", "", address)
    form = _FORMS.get(protocol)
    found = re.fullmatch(form, remaining, re.ASCII) if form is not None and is_plain(address) else None
    port = int(found.groupdict().get("port") or 80) if found is not None else 0
    if found is None or ".." in remaining.split("/") or port not in WEB_PORTS:
        raise SpecError(
            f"{address[:100]!r} is no address of data: it begins with one of {', '.join(_FORMS)}, then ://, and has no "
            "user, query, fragment, revision, '..', '::', code like %2e for one of . / ? # %, nor a port below 1024 "
            "other than 80 and 443"
        )
    return protocol, found


def is_public(host: str) -> bool:
    """Return whether an IP address is of the public internet, also the IPv4 address that one of IPv6 leads to.

    False for private, loopback, link-local, shared (CGNAT), multicast, reserved and metadata addresses.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in _UNICAST:
            return False
    return not any(address in network for network in _SPECIAL)
