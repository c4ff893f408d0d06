"""Small JSON documents of authorization servers, from where the operator said that they are."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp
from yarl import URL

SECONDS = 5.0
MAX_BYTES = 262_144
_IDLE_SECONDS = 3.0
_HEADERS = {
    "accept": "application/json",
    "accept-encoding": "identity",  # so that the limit is one on what is really read
    "user-agent": "task-broker",
}


class NoDocument(Exception):
    """There is none. `why` is one word, for metrics and logs."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class Documents:
    """Asks for documents. Redirects are not followed, and no proxy of the environment is used."""

    def __init__(self) -> None:
        self._opened: aiohttp.ClientSession | None = None

    async def get(self, url: str) -> bytes:
        """The document at a URL. Raises NoDocument."""
        return await _read(
            self._session().get(URL(url, encoded=True), headers=_HEADERS, allow_redirects=False)
        )

    async def post(self, url: str, form: Mapping[str, str], authorization: str) -> bytes:
        """The answer to a form. Raises NoDocument."""
        return await _read(
            self._session().post(
                URL(url, encoded=True),
                data=dict(form),
                headers={**_HEADERS, "authorization": authorization},
                allow_redirects=False,
            )
        )

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(keepalive_timeout=_IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._opened


async def _read(asked: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> bytes:
    try:
        async with asked as response:
            try:
                return await _body(response)
            except NoDocument:
                response.close()  # the rest is not wanted
                raise
    except TimeoutError:
        raise NoDocument("timeout") from None
    except aiohttp.ClientConnectorError:
        raise NoDocument("unreachable") from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise NoDocument("broken") from None


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if 300 <= response.status < 400:
        raise NoDocument("redirect")
    if response.status != 200:
        raise NoDocument(f"{response.status // 100}xx")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BYTES:
            raise NoDocument("too_large")
    return bytes(body)
