"""The program of one worker process of services/pool.py: it calls functions by name until its pipe closes.

Its answers are JSON: texts of a model may have been evaluated here, and the parent unpickles nothing that comes from here.
"""

import importlib
import json
import logging
import sys
from multiprocessing.connection import Connection

MOST_MESSAGE = 2000  # characters


def serve(connection: Connection) -> None:
    """Answers (module, function, arguments) with [true, value] or [false, message], one at a time."""
    while True:
        try:
            module, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = json.dumps([True, getattr(importlib.import_module(module), function)(*arguments)])
        except Exception as error:  # the caller marks the sample invalid
            answer = json.dumps([False, f"{type(error).__name__}: {error}"[:MOST_MESSAGE]])
        connection.send_bytes(answer.encode())


def limit_memory(gigabytes: float) -> None:
    """Lets allocations beyond the limit fail (Linux), so that one expression cannot fill the host's memory."""
    if sys.platform == "linux":
        import resource

        size = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def shut_in() -> str:
    """Confines this process to reading and computing; returns the problem that prevents it, or ""."""
    if sys.platform != "linux":
        return f"the kernel's filter is Linux's alone (this is {sys.platform})"
    from jaxrl_llm.rewards.services.confine import confine

    try:
        confine()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # verifiers log every text they cannot parse
    limit_memory(float(sys.argv[2]))
    pipe = Connection(int(sys.argv[1]))
    problem = shut_in()
    pipe.send_bytes(json.dumps(problem).encode())  # the first message; whoever asks decides whether to go on
    serve(pipe)
