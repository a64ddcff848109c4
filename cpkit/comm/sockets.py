"""The side channel of ranks that are processes: a TCP connection between every two of them.

What a rank sends lies in its peers' socket buffers until they ask. So nobody needs a thread, an exchange that was begun
early costs a system call a peer later, a rank that died shows as a closed connection, and each rank sees by itself who
has not come.

    frame      kind, 1 byte (D data, A alarm)     length, 4 bytes     payload
    greeting   token, 16 bytes                    rank, 4 bytes       once, by the higher rank of a pair, who connects
"""

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from cpkit.comm.call import spell_ranks
from cpkit.comm.side_channel import SideChannel
from cpkit.errors import DesyncError

ADDRESS_BYTES = 256
GREETING_S = 5.0
"""How long a caller may be silent."""

CONNECT_S = 60.0
"""How long ranks that have just met may take to connect."""

_TOKEN_BYTES = 16
_FRAME = struct.Struct("<cI")
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_DATA, _ALARM = b"D", b"A"
_READ_BYTES = 1 << 14
LOOK_MS = 20
"""How long a rank waits for one other before it looks at all."""

WRITE_S = 0.001
"""How long it lets others read, when what it sends does not fit their buffers."""

_ALARM_BYTES = 1 << 15
"""Longest text of an alarm: it must fit an empty socket buffer, as an alarm waits for nobody."""


class Listener:
    """A rank's open door, before it knows the others'. address: [ADDRESS_BYTES] host, port and a token."""

    def __init__(self, backlog: int) -> None:
        self.host = socket.gethostname()
        self._server = socket.create_server(("", 0), backlog=max(backlog, 1))
        text = f"{self.host} {self._server.getsockname()[1]} {os.urandom(_TOKEN_BYTES).hex()}"
        self.address = text.encode().ljust(ADDRESS_BYTES)

    def connect(self, rank: int, addresses: Sequence[bytes], limit_s: float) -> "SocketChannel":
        """The channel to all ranks whose addresses these are. Raises DesyncError when one cannot be reached."""
        doors = [address.decode().split() for address in addresses]
        token = bytes.fromhex(doors[0][2])  # all ranks use rank 0's, so that no other job's rank can come in
        deadline = time.monotonic() + limit_s
        peers: dict[int, socket.socket] = {}
        peer = 0
        try:
            for peer in range(rank):
                host, port = doors[peer][0], int(doors[peer][1])
                near = host == self.host
                peers[peer] = socket.create_connection(("127.0.0.1" if near else host, port), _left(deadline))
                peers[peer].sendall(_GREETING.pack(token, rank))
            while len(peers) < len(doors) - 1:
                peer = next(other for other in range(rank + 1, len(doors)) if other not in peers)
                self._accept(peers, token, deadline)
        except OSError as broken:
            for one in peers.values():
                one.close()
            raise DesyncError(
                f"rank {rank} has no side channel to rank {peer} ({broken}): the hosts of a job must reach each other "
                "by name over TCP; --guard off does without"
            ) from broken
        finally:
            self._server.close()
        return SocketChannel(rank, peers)

    def _accept(self, peers: dict[int, socket.socket], token: bytes, deadline: float) -> None:
        self._server.settimeout(_left(deadline))
        caller, _ = self._server.accept()
        caller.settimeout(min(GREETING_S, _left(deadline)))
        try:
            said = caller.recv(_GREETING.size)
        except OSError:
            said = b""
        if len(said) < _GREETING.size or _GREETING.unpack(said)[0] != token:
            caller.close()  # a stranger: ports are scanned
            return
        peers[_GREETING.unpack(said)[1]] = caller


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


class _Peer:
    """One rank's connection: frames that have come, bytes of the next one, bytes that still have to go."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.connection = connection
        self.poll = select.poll()
        self.poll.register(connection, select.POLLIN)
        self.frames: deque[bytes] = deque()
        self.alarm: str | None = None
        self.is_gone = False
        self._arrived = bytearray()
        self._unsent = b""

    @property
    def has_unsent(self) -> bool:
        """Its socket buffer was full."""
        return bool(self._unsent)

    def send(self, kind: bytes, payload: bytes) -> None:
        """Hand a frame to the kernel, as much as it takes."""
        self._unsent += _FRAME.pack(kind, len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Hand it what is left."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                self._unsent = b""  # it is gone; what it said last is still to be read

    def read(self) -> None:
        """Take in what has come."""
        while not self.is_gone:
            try:
                chunk = self.connection.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            self.is_gone = not chunk
            self._arrived += chunk
            self._cut()
            if len(chunk) < _READ_BYTES:
                return

    def _cut(self) -> None:
        while len(self._arrived) >= _FRAME.size:
            kind, length = _FRAME.unpack_from(self._arrived)
            end = _FRAME.size + length
            if len(self._arrived) < end:
                return
            payload = bytes(self._arrived[_FRAME.size : end])
            del self._arrived[:end]
            if kind == _ALARM:
                self.alarm = payload.decode(errors="replace")  # a long text is cut anywhere
            else:
                self.frames.append(payload)


class SocketChannel(SideChannel):
    """A rank's connections to all others. Any thread may ask for alarms; an exchange under way finds them itself."""

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._peers = {peer: _Peer(connections[peer]) for peer in sorted(connections)}
        self._own = b""
        self._has_alarmed = False
        self._lock = threading.RLock()

    def start(self, message: bytes) -> None:
        """Send to all ranks."""
        self._own = message
        with self._lock:
            for peer in self._peers.values():
                peer.send(_DATA, message)

    def finish(self, limit_s: float, what: str) -> list[bytes]:
        """What all ranks sent, by rank."""
        with self._lock:
            return self._finish(limit_s, what)

    def _finish(self, limit_s: float, what: str) -> list[bytes]:
        deadline = time.monotonic() + limit_s
        for peer in self._peers.values():
            if not peer.frames:
                peer.read()
        for peer in self._peers.values():
            while not peer.frames or peer.has_unsent:
                # woken by this rank alone: by the time that it has come, most others have
                if not peer.is_gone and not peer.has_unsent and peer.poll.poll(LOOK_MS):
                    peer.read()
                    continue
                self._look_around(what)
                time.sleep(WRITE_S if peer.has_unsent else 0)
                if time.monotonic() > deadline:
                    late = sorted(rank for rank, peer in self._peers.items() if not peer.frames)
                    self._give_up(f"{what}: {spell_ranks(late)} did not come within {limit_s:g} s")
        self._raise_heard()  # also when this rank came so late that the others have given up
        said = {rank: peer.frames.popleft() for rank, peer in self._peers.items()}
        said[self.rank] = self._own
        return [said[rank] for rank in sorted(said)]

    def alarm(self, text: str) -> None:
        """Tell all others once."""
        with self._lock:
            if not self._has_alarmed:
                self._has_alarmed = True
                for peer in self._peers.values():
                    peer.send(_ALARM, text.encode()[:_ALARM_BYTES])

    def heard(self) -> str | None:
        """What another rank's alarm says."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            for peer in self._peers.values():
                peer.read()
            return self._alarm()
        finally:
            self._lock.release()

    def _alarm(self) -> str | None:
        return next((peer.alarm for peer in self._peers.values() if peer.alarm is not None), None)

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""
        for peer in self._peers.values():
            peer.connection.close()

    def _look_around(self, what: str) -> None:
        """Read and write what can be; raise what another rank has said, or who is gone without a word."""
        for peer in self._peers.values():
            peer.flush()
            peer.read()
        self._raise_heard()
        gone = sorted(rank for rank, peer in self._peers.items() if peer.is_gone and not peer.frames)
        if gone:
            is_one = len(gone) == 1
            self._give_up(f"{what}: {spell_ranks(gone)} {'is' if is_one else 'are'} gone: died, or ended before")

    def _raise_heard(self) -> None:
        heard = self._alarm()
        if heard is not None:
            self._has_alarmed = True  # they know
            raise DesyncError(heard)

    def _give_up(self, text: str) -> None:
        self.alarm(text)
        raise DesyncError(text)
