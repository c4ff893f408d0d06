"""The yardstick: a bare ASGI application that reads the body and answers a fixed one."""

import os
from typing import Any

_BODY = b"x" * int(os.environ["BENCH_ANSWER_BYTES"])
_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-length", b"%d" % len(_BODY)), (b"content-type", b"application/json")],
}
_END = {"type": "http.response.body", "body": _BODY}


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        raise RuntimeError("requests only")  # uvicorn goes on without a lifespan
    while (await receive()).get("more_body"):
        pass
    await send(_START)
    await send(_END)
