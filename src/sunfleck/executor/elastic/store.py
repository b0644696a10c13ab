"""The rendezvous store of a node: a TCPStore in a process of its own, run by the agent as worker of the job `store`.

It must not live in a worker (its rounds would end with it). It serves until its agent's socket closes. What rounds
leave in it is deleted by rank 0 of the round after.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

from sunfleck.executor.launch.wire import Announce, EndProgram, StoreReady

from .link import AgentGone, Link

JOB = "store"
"""Name of the pseudo-job whose workers are stores."""


def main() -> int:
    link = Link.from_environment()
    if link is None:
        print("sunfleck: the store is started by an agent, not by hand", file=sys.stderr)
        return 2
    from torch.distributed import TCPStore

    # On a machine of virtual nodes nobody outside needs to reach it; elsewhere the peers on other hosts do.
    local = os.environ.get("SUNFLECK_NODE_HOST", "localhost") in ("localhost", "127.0.0.1")
    listener = socket.create_server(("127.0.0.1" if local else "0.0.0.0", 0), backlog=1024)
    port = listener.getsockname()[1]
    server = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    link.send(StoreReady(port=server.port))
    try:
        while True:
            for command in link.read(timeout_s=3600.0):
                if isinstance(command, Announce):
                    link.send(StoreReady(port=server.port))
                elif isinstance(command, EndProgram):
                    os._exit(0)
    except AgentGone:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
