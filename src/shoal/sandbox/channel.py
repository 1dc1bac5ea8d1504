"""`import channel` in a program that was opened for a conversation: whole frames to and from the process outside.

Invariant: a frame is 4 bytes of length, big-endian, then that many bytes. Called by the model's side only; the outside has
its own reader with a limit (`conversation.py`). Left out: any meaning of the bytes.
"""

import os

INCOMING, OUTGOING = 3, 4


def receive() -> bytes | None:
    """The next frame, or None when the other side has no more."""
    head = _read(4)
    return None if len(head) < 4 else _read(int.from_bytes(head, "big"))


def send(frame: bytes) -> None:
    data = memoryview(len(frame).to_bytes(4, "big") + frame)
    while data:
        data = data[os.write(OUTGOING, data) :]


def _read(size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(INCOMING, min(size, 1 << 16))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
