"""The CURVE keys of a pool, and who may talk to its controller.

A pool has two key pairs: the server's, which proves to agents and clients that this is the pool they mean, and the
client's, which proves to the controller that they may command it. Both live in `<pool directory>/keys`, readable by
the owner alone; whoever can read them is, by definition, a user of this pool. They are made once and kept, so that
agents that outlive a controller can call in to the next one.

Who is let in is decided by pyzmq's ZAP authenticator. The sockets carry a ZAP domain that is enforced: without a
running authenticator nobody gets in, rather than everybody.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.auth.certs import create_certificates, load_certificate

from sunfleck.core.errors import SunfleckError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

ZAP_DOMAIN = b"sunfleck"


class KeyPair(NamedTuple):
    """CURVE keys, z85 encoded."""

    public: bytes
    secret: bytes


class PoolKeys(NamedTuple):
    server: KeyPair
    client: KeyPair

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that will bind accept only what the authenticator lets in."""
        socket.curve_server = True
        socket.curve_secretkey = self.server.secret
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], client: KeyPair, server_public: bytes) -> None:
    """Make a socket that will connect prove who it is, and talk to nobody but the owner of `server_public`."""
    socket.curve_publickey = client.public
    socket.curve_secretkey = client.secret
    socket.curve_serverkey = server_public


def private_directory(path: Path) -> Path:
    """Make `path` if it is missing, mode 0700. Raises SunfleckError when others could look into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise SunfleckError(f"{path} belongs to user {found.st_uid}, not to you: choose another pool directory")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise SunfleckError(f"{path} can be read by others and holds keys: run `chmod 700 {path}`")
    return path


def ensure_keys(pool_dir: Path) -> PoolKeys:
    """The pool's keys, made now if there are none. Safe against two controllers starting at once."""
    private_directory(pool_dir)
    target = pool_dir / "keys"
    if not target.exists():
        made = Path(tempfile.mkdtemp(prefix=".keys-", dir=pool_dir))  # mode 0700
        try:
            for name in ("server", "client"):
                for file in create_certificates(str(made), name):
                    os.chmod(file, 0o600)
            os.rename(made, target)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not target.exists():  # otherwise somebody else was first; theirs are as good
                raise
    return PoolKeys(server=_load(target, "server"), client=_load(target, "client"))


def load_client_keys(pool_dir: Path) -> KeyPair:
    """What an agent or a client needs. Raises SunfleckError when there are none or they are not ours to read."""
    return _load(pool_dir / "keys", "client")


def _load(directory: Path, name: str) -> KeyPair:
    path = directory / f"{name}.key_secret"
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise SunfleckError(f"{path} can be read by others: run `chmod 600 {path}`")
        public, secret = load_certificate(str(path))
    except PermissionError as error:
        raise SunfleckError(f"{path} is not yours to read: this pool belongs to somebody else") from error
    except (OSError, ValueError) as error:
        raise SunfleckError(f"no usable key in {path} ({error}): stop the pool and remove {directory}") from error
    if secret is None:
        raise SunfleckError(f"{path} holds no secret key: stop the pool and remove {directory}")
    return KeyPair(public, secret)


class _OnlyTheClientKey:
    """What pyzmq calls a credentials provider."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def start_authenticator(context: zmq.Context[Any], keys: PoolKeys) -> ThreadAuthenticator:
    """Let in the holders of the pool's client key, on all secured sockets of `context`. Stop it before the context."""
    from zmq.auth.thread import ThreadAuthenticator  # pulls in asyncio: not for agents, who import this file too

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), _OnlyTheClientKey(keys.client.public))
    return authenticator
