"""Whither a signal may be sent: which URLs name a place, and which addresses are public.

The ranges are written out, since what `ipaddress` calls global or private differs between
releases of Python. What is not in them is public in no case.
"""

from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address


class Reach(IntEnum):
    """Who can be behind an address, the least welcome first."""

    NEVER = 0
    """Nobody a signal is meant for: cloud metadata, link-local, multicast, reserved."""
    PRIVATE = 1
    """This host or its own network."""
    PUBLIC = 2


def public(address: Address) -> bool:
    """Whether the address belongs to somebody on the public internet, however it is written."""
    return reach(address) is Reach.PUBLIC


def reach(address: Address) -> Reach:
    """Who can be behind an address. One that carries an IPv4 address is judged by that."""
    if isinstance(address, IPv4Address):
        return _reach_v4(address)
    if address.scope_id is not None:
        return Reach.NEVER  # only link-local addresses need a scope
    if address in _LOOPBACK_V6:
        return Reach.PRIVATE
    if carried := _carried(address):
        return min(map(_reach_v4, carried))
    if any(address in network for network in _METADATA_V6):
        return Reach.NEVER
    if address in _UNIQUE_LOCAL:
        return Reach.PRIVATE
    if address not in _UNICAST_V6 or any(address in network for network in _SPECIAL_V6):
        return Reach.NEVER
    return Reach.PUBLIC


def url_fault(url: str) -> str | None:
    """What is wrong with a URL that is to be called, whatever its host resolves to."""
    try:
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        plain = False
    if not plain or not url.isascii() or not url.isprintable() or " " in url:
        return "A URL must begin with http:// or https:// and name a host."
    if not all(0 < len(label) < 64 for label in (parts.hostname or "").rstrip(".").split(".")):
        return "The host of the URL is no host name."
    if parts.username is not None or parts.fragment:
        return "A URL must have no user name, no password and no fragment."
    return None


def _reach_v4(address: IPv4Address) -> Reach:
    if address in _METADATA_V4:
        return Reach.NEVER
    if any(address in network for network in _PRIVATE_V4):
        return Reach.PRIVATE
    if any(address in network for network in _SPECIAL_V4):
        return Reach.NEVER
    return Reach.PUBLIC


def _carried(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that packets to this one may end at."""
    if any(address in network for network in _V4_IN_THE_LAST_BITS):
        return (IPv4Address(int(address) & 0xFFFF_FFFF),)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    return address.teredo or ()


_METADATA_V4 = {
    IPv4Address("100.100.100.200"),  # Alibaba Cloud
    IPv4Address("168.63.129.16"),  # Azure; looks public
    IPv4Address("192.0.0.192"),  # Oracle Cloud
    # 169.254.169.254 and its neighbours are link-local.
}
_PRIVATE_V4 = [
    IPv4Network("10.0.0.0/8"),
    IPv4Network("100.64.0.0/10"),  # behind the NAT of a carrier; also overlay networks
    IPv4Network("127.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
]
_SPECIAL_V4 = [
    IPv4Network("0.0.0.0/8"),  # 0.0.0.0 connects to this host
    IPv4Network("169.254.0.0/16"),  # link-local, with the metadata services of most clouds
    IPv4Network("192.0.0.0/24"),  # protocol assignments
    IPv4Network("192.0.2.0/24"),  # documentation
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv4Network("198.18.0.0/15"),  # benchmarking
    IPv4Network("198.51.100.0/24"),  # documentation
    IPv4Network("203.0.113.0/24"),  # documentation
    IPv4Network("224.0.0.0/4"),  # multicast
    IPv4Network("240.0.0.0/4"),  # reserved, and broadcast
]

_LOOPBACK_V6 = IPv6Network("::1/128")
_V4_IN_THE_LAST_BITS = [
    IPv6Network("::/96"),  # IPv4-compatible
    IPv6Network("::ffff:0:0/96"),  # IPv4-mapped
    IPv6Network("64:ff9b::/96"),  # NAT64
    IPv6Network("64:ff9b:1::/96"),  # NAT64 of a local network; the rest of its /48 is refused,
    # since the IPv4 address may be in other bits there
]
_METADATA_V6 = [
    IPv6Network("fd00:42::42/128"),  # Scaleway
    IPv6Network("fd00:100::100:200/128"),  # Alibaba Cloud
    IPv6Network("fd00:a9fe:a9fe::1/128"),  # Linode
    IPv6Network("fd00:c1::a9fe:a9fe/128"),  # Oracle Cloud
    IPv6Network("fd00:ec2::/32"),  # AWS
    IPv6Network("fd20:ce::254/128"),  # Google Cloud
]
_UNIQUE_LOCAL = IPv6Network("fc00::/7")
_UNICAST_V6 = IPv6Network("2000::/3")
_SPECIAL_V6 = [
    IPv6Network("2001::/23"),  # protocol assignments and benchmarking
    IPv6Network("2001:db8::/32"),  # documentation
    IPv6Network("3fff::/20"),  # documentation
]
