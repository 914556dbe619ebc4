"""Rules for webhooks: which addresses may be told, and when a failed delivery is tried again. Pure."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

TRY_AFTER_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 21600.0, 43200.0, 86400.0)
"""Pauses between the tries of one delivery; after the last one it is given up, about two days after the first."""
GONE = 410
"""The status by which a receiver says that it wants no more of this."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPv4 = ipaddress.IPv4Address


def next_try_at(tries: int, now: float) -> float | None:
    """When a delivery that has failed `tries` times is tried again; None = it is given up."""
    assert tries >= 1
    return now + TRY_AFTER_S[tries - 1] if tries <= len(TRY_AFTER_S) else None


def url_fault(url: str) -> str | None:
    """What is wrong with the form of a webhook's URL; None when nothing is."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "it must begin with https:// or http://"
    if not host or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        return "it names no host" if not host else "it has spaces or control characters"
    if parts.username is not None or parts.password is not None:
        return "a user name or password does not belong into it; the signature proves who sends"
    return "the part after # is never sent; leave it out" if parts.fragment else None


def named_address(url: str) -> str | None:
    """The host of a URL where that is an address itself or this machine's own name; None for any other name."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return None


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, and so not to this host, its network or its cloud's metadata.

    An IPv4 address inside an IPv6 one (mapped, 6to4, Teredo, NAT64) counts as what it stands for.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner: list[_IPv4] = [found for found in (ip.ipv4_mapped, ip.sixtofour) if found is not None]
        inner += list(ip.teredo or ())
        if ip in _NAT64:
            inner.append(_IPv4(int(ip) & 0xFFFFFFFF))
        if inner:
            return all(is_public(str(found)) for found in inner)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_loopback or ip.is_link_local)
