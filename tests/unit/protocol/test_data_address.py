"""Addresses by a stranger: one strict form, and nothing private behind a public one."""

from __future__ import annotations

import pytest

from protocol.data_address import check_address, is_public, public_url
from protocol.errors import SpecError


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://a.example", "http://a.example"),
        ("https://a.example:8443/x/y%20z/", "https://a.example:8443/x/y%20z/"),
        ("http://a.example:1024/x", "http://a.example:1024/x"),
        ("http://a.example:443/x", "http://a.example:443/x"),
        ("http://[2001:db8::1]:80/x", "http://[2001:db8::1]:80/x"),
        ("s3://my-bucket/x/y", "https://my-bucket.s3.amazonaws.com/x/y"),
        ("s3://my-bucket", "https://my-bucket.s3.amazonaws.com"),
        ("gs://my.bucket/x", "https://storage.googleapis.com/my.bucket/x"),
        ("gcs://b", "https://storage.googleapis.com/b"),
        ("hf://datasets/org/name/x", "https://huggingface.co/datasets/org/name/resolve/main/x"),
        ("hf://org/name", "https://huggingface.co/org/name/resolve/main"),
        ("s3://my.bucket/x", None),
        ("az://container/x", None),
        ("abfs://container/x", None),
        ("file:///srv/data", None),
        ("/srv/my data", None),
        ("data/shards", None),
    ],
)
def test_an_address_is_a_public_url_or_private(address: str, url: str | None):
    assert public_url(address) == url


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ftp://a.example/x",
        "HTTP://a.example/x",
        "simplecache::file:///x",
        "file:///x::memory://y",
        "s3://bucket/x::file:///y",
        "simplecache::https://a.example/x",
        "http://a.example/x?y=1",
        "http://10.0.0.1/admin/delete?id=1#",
        "http://a.example/x#y",
        "http://user@a.example/x",
        "http://user:secret@a.example/x",
        "abfs://container@account.dfs.core.windows.net/x",
        "hf://datasets/org/name@main/x",
        "/srv/x?y",
        "file:///srv/x#y",
        "http://a.example/../x",
        "gs://bucket/../other",
        "file:///srv/../etc",
        "http:///x",
        "http://",
        "s3://",
        "s3:///x",
        "hf://org",
        "http://a.example:99999/x",
        "http://a.example:/x",
        "http://a.example\\x",
        "http://a.example/x y",
        "http://a.example/\x7f",
        "http://ä.example/x",
        "s3://arn:aws:s3:::bucket/x",
        "http://[::1%eth0]/x",
        *(f"http://a.example/x{code}y" for code in ("%2e%2e", "%2F", "%3f", "%23", "%25", "%5C", "%00", "%0a", "%7f")),
        "gs://bucket/%2e%2E/other",
        "http://a.example/%",
        "http://a.example/%zz",
        "http://a.example:0/x",
        "http://a.example:22/x",
        "https://a.example:1023/x",
    ],
)
def test_what_could_name_another_file_or_start_other_code_is_refused(address: str):
    with pytest.raises(SpecError, match="is no address of data") as caught:
        check_address(address)
    assert str(caught.value).isprintable()


PRIVATE = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9", "169.254.169.254",
    "168.63.129.16", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.168.1.1", "198.18.0.1",
    "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "100.63.0.1", "100.128.0.1"]


@pytest.mark.parametrize("host", PRIVATE)
@pytest.mark.parametrize("form", ["{}", "::ffff:{}", "::{}", "64:ff9b::{}", "64:ff9b:1::{}"])
def test_no_form_of_a_private_address_is_public(host: str, form: str):
    assert not is_public(form.format(host))


@pytest.mark.parametrize("host", PUBLIC)
@pytest.mark.parametrize("form", ["{}", "::ffff:{}", "64:ff9b::{}"])
def test_public_addresses_are_public_also_through_a_translator(host: str, form: str):
    assert is_public(form.format(host))


@pytest.mark.parametrize(
    "host",
    [
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "ff0e::1",
        "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001::1", "100::1", "5f00::1", "localhost", "", "1.2.3",
        "0x7f000001", "2130706433", "127.1",
    ],
)  # fmt: skip
def test_other_private_addresses_and_names_are_not_public(host: str):
    assert not is_public(host)


def test_a_public_address_of_ipv6_is_public():
    assert is_public("2606:4700:4700::1111") and is_public("2a00:1450:4001:80b::200e")
