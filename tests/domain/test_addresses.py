"""Which addresses and URLs a signal may be sent to."""

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.addresses import Reach, public, reach, url_fault

PUBLIC = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
    "126.255.255.255", "128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255",
    "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0",
    "198.17.255.255", "198.20.0.0", "223.255.255.255",
    "2001:200::1", "2001:4860:4860::8888", "2003::1", "2606:4700:4700::1111", "2a00:1450::1",
    "3ffe::1", "3fff:1000::1",
]  # fmt: skip
PRIVATE = [
    "10.0.0.0", "10.255.255.255", "100.64.0.0", "100.127.255.255", "127.0.0.1", "127.255.255.255",
    "172.16.0.0", "172.31.255.255", "192.168.0.0", "192.168.255.255", "::1", "fc00::1",
    "fd12:3456:789a::1", "fdff:ffff::1",
]  # fmt: skip
NEVER = [
    "0.0.0.0", "0.255.255.255", "192.0.0.8", "192.0.0.255", "192.0.2.1", "192.88.99.1",  # noqa: S104
    "198.18.0.0", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255",
    "169.254.0.1", "169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192",
    "168.63.129.16",
    "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42",
    "fd00:a9fe:a9fe::1", "fd00:100::100:200",
    "::", "100::1", "2001:2::1", "2001:10::1", "2001:db8::1", "3fff::1", "3fff:fff::1", "4000::1",
    "5f00::1", "fe80::1", "fe80::1%eth0", "febf::1", "fec0::1", "ff02::1", "ff0e::1",
    "2606:4700:4700::1111%eth0", "::ffff:0:8.8.8.8", "64:ff9b:0:1::808:808",
    "64:ff9b:1:a9fe:a9:fe00:808:808",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "who"),
    [(text, Reach.PUBLIC) for text in PUBLIC]
    + [(text, Reach.PRIVATE) for text in PRIVATE]
    + [(text, Reach.NEVER) for text in NEVER],
)
def test_who_can_be_behind_an_address(text: str, who: Reach) -> None:
    assert reach(ip_address(text)) is who
    assert public(ip_address(text)) == (who is Reach.PUBLIC)


EMBEDDINGS: dict[str, Callable[[int], int]] = {
    "mapped": lambda v4: int(IPv6Address("::ffff:0:0")) | v4,
    "compatible": lambda v4: v4,
    "nat64": lambda v4: int(IPv6Address("64:ff9b::")) | v4,
    "local nat64": lambda v4: int(IPv6Address("64:ff9b:1::")) | v4,
    "6to4": lambda v4: int(IPv6Address("2002::1")) | v4 << 80,
    "teredo client": lambda v4: int(IPv6Address("2001:0:808:808::")) | v4 ^ 0xFFFF_FFFF,
    "teredo server": lambda v4: int(IPv6Address("2001:0::f7f7:f7f7")) | v4 << 64,
}
embeddings = pytest.mark.parametrize("embed", EMBEDDINGS.values(), ids=EMBEDDINGS.keys())


@embeddings
@given(st.ip_addresses(v=4))
def test_an_embedded_address_is_judged_as_the_address_itself(
    embed: Callable[[int], int], address: IPv4Address
) -> None:
    embedded = IPv6Address(embed(int(address)))
    if embedded != IPv6Address("::1"):  # which is the loopback address, and no 0.0.0.1
        assert reach(embedded) is reach(address)


@embeddings
@pytest.mark.parametrize("text", ["10.1.2.3", "127.0.0.1", "169.254.169.254", "8.8.8.8"])
def test_examples_of_embedded_addresses(embed: Callable[[int], int], text: str) -> None:
    assert public(IPv6Address(embed(int(IPv4Address(text))))) == (text == "8.8.8.8")


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_knows_to_be_special(
    address: IPv4Address | IPv6Address,
) -> None:
    if address.is_private or address.is_multicast or address.is_link_local or address.is_reserved:
        # Embedded ones are special to it, but not what they carry.
        carries = isinstance(address, IPv6Address) and (
            address.ipv4_mapped or address.sixtofour or address.teredo or int(address) >> 32 == 0
            or str(address).startswith("64:ff9b:")
        )  # fmt: skip
        assert carries or not public(address)


@pytest.mark.parametrize(
    "url",
    ["https://tools.example/hook", "http://tools.example", "HTTPS://Tools.Example:8443/a?b=c&d",
     "https://10.0.0.1:1/", "https://[2001:db8::1]:65535/x", "https://tools.example./"],
)  # fmt: skip
def test_urls_that_can_be_called(url: str) -> None:
    assert url_fault(url) is None


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("", "begin with http"),
        ("ftp://tools.example/", "begin with http"),
        ("file:///etc/passwd", "begin with http"),
        ("//tools.example/", "begin with http"),
        ("https://", "name a host"),
        ("https:///hook", "name a host"),
        ("https://tools.example:0/", "begin with http"),
        ("https://tools.example:65536/", "begin with http"),
        ("https://[::1/", "begin with http"),
        (" https://tools.example/", "begin with http"),
        ("https://tools.example/a b", "begin with http"),
        ("https://tools.example/a\nb", "begin with http"),
        ("https://tools.exämple/", "begin with http"),
        ("https://tools..example/", "no host name"),
        (f"https://{'a' * 64}.example/", "no host name"),
        ("https://me@tools.example/", "no user name"),
        ("https://me:secret@tools.example/", "no user name"),
        ("https://@tools.example/", "no user name"),
        ("https://tools.example\\@10.0.0.1/", "no user name"),
        ("https://tools.example/#part", "and no fragment"),
    ],
)
def test_urls_that_cannot(url: str, fault: str) -> None:
    said = url_fault(url)
    assert said is not None
    assert fault in said
