"""The program of one worker process of rewards/pool.py: calls functions by name until its pipe closes."""

import importlib
import logging
import sys
from multiprocessing.connection import Connection


def serve(connection: Connection) -> None:
    """Answers (module, function, arguments) with (True, value) or (False, message), one at a time."""
    connection.send(True)
    while True:
        try:
            module, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(importlib.import_module(module), function)(*arguments)))
        except Exception as error:  # the caller marks the sample invalid
            connection.send((False, f"{type(error).__name__}: {error}"))


def limit_memory(gigabytes: float) -> None:
    """Lets allocations beyond the limit fail (Linux), so that one expression cannot fill the host's memory."""
    if sys.platform == "linux":
        import resource

        size = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # verifiers log every text they cannot parse
    limit_memory(float(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
