"""What Ray starts as a worker in tests: it has the server of `support.warm_workers` fork one, and ends with it.

It imports as little as it can, for it is started as often as there are actors.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["MBAAS_TESTS_WARM_WORKERS"])
    asked = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib is slow to import
        "path": sys.path[1:],
    }
    message = json.dumps(asked).encode()
    socket.send_fds(connection, [message[:1]], [0, 1, 2])
    connection.sendall(message[1:])
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
