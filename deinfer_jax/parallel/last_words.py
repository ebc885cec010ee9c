"""Says that process 0 died, for a process that could not say it itself; run as a script.

JAX's runtime aborts a process whose coordinator is gone, within milliseconds and from a thread of
its own: no Python runs any more, and what it prints has no number. This small process outlives it.
It waits until its standard input ends; where that was not announced by a line, and nobody answers
at the coordinator's address any more, it tells why. It imports nothing that is large.

Usage: last_words.py HOST PORT INDEX
"""

import socket
import sys


def main() -> None:
    """See above."""
    host, port, index = sys.argv[1:]
    if sys.stdin.buffer.readline():
        return
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError as error:
        sys.stderr.write(
            f"deinfer_jax: process 0 died: its coordinator does not answer at {host}:{port} "
            f"({error}); process {index} has ended too\n"
        )


if __name__ == "__main__":
    main()
