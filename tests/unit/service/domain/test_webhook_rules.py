"""Which addresses may be told, and when a failed delivery is tried again."""

import pytest

from posttrain_service.domain.webhooks import TRY_AFTER_S, is_public, named_address, next_try_at, url_fault


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
        "2001:0:7f00:1::", "localhost", "not an address", "",
    ],
)  # fmt: skip
def test_addresses_that_may_not_be_told(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::6810:84e5", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_may(address):
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("https://example.org/hook?a=b", None),
        ("http://example.org:8080", None),
        ("https://[2606:4700::1]:8443/x", None),
        ("ftp://example.org", "https://"),
        ("example.org/hook", "https://"),
        ("https://", "no host"),
        ("https://user@example.org", "user name"),
        ("https://example.org/#x", "#"),
        ("https://example.org/a b", "spaces"),
        ("https://example.org:0x/", "Port"),
        ("https://[::1", "IPv6"),
    ],
)
def test_the_form_of_a_url(url, fault):
    found = url_fault(url)
    assert (found is None) if fault is None else (fault in found)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost:80/", "127.0.0.1"),
        ("http://a.localhost/", "127.0.0.1"),
        ("http://LOCALHOST/", "127.0.0.1"),
        ("http://[fe80::1]/", "fe80::1"),
        ("http://10.0.0.1/", "10.0.0.1"),
        ("http://example.org/", None),
    ],
)
def test_hosts_that_are_addresses(url, address):
    assert named_address(url) == address


def test_tries_become_rarer_and_end():
    pauses = [next_try_at(tries, 100.0) for tries in range(1, len(TRY_AFTER_S) + 2)]
    assert pauses == [100.0 + pause for pause in TRY_AFTER_S] + [None]
    assert list(TRY_AFTER_S) == sorted(TRY_AFTER_S)
    assert sum(TRY_AFTER_S) < 3 * 86400
