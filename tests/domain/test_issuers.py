"""Where the documents of issuers are, and what their URLs may be."""

import pytest

from app.domain.issuers import endpoint_fault, metadata_urls


def test_metadata_is_beside_the_path_of_an_issuer_or_below_it() -> None:
    assert metadata_urls("https://id.example") == [
        "https://id.example/.well-known/oauth-authorization-server",
        "https://id.example/.well-known/openid-configuration",
    ]
    assert metadata_urls("https://id.example/tenant/") == [
        "https://id.example/.well-known/oauth-authorization-server/tenant",
        "https://id.example/.well-known/openid-configuration/tenant",
        "https://id.example/tenant/.well-known/openid-configuration",
    ]


@pytest.mark.parametrize(
    "url", ["https://id.example/x", "http://localhost:1/x", "http://127.0.0.9", "http://[::1]:8/x"]
)
def test_plain_http_is_for_this_machine_only(url: str) -> None:
    assert endpoint_fault(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://id.example/x",
        "http://10.0.0.1/x",
        "http://localhost.example/x",
        "ftp://localhost/x",
        "https://user:pw@id.example/x",
        "https:///x",
        "id.example",
        "",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    assert endpoint_fault(url) is not None
