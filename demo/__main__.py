"""Serves the demo tool server on a socket that it was handed, for as long as its parent lives.

python -m demo FILE_DESCRIPTOR        standard input closes when the parent has ended
"""

import socket
import sys
import threading

import uvicorn

from demo.fixtures import app


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))

    def end_with_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
