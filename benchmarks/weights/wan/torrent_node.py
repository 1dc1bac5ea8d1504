"""A BitTorrent peer, run by the peers' Python: torrent_node.py OWN ORIGIN SCALE PEER...   (addresses)

The origin reads the file's name from standard input, cuts and seeds it, and serves the torrent over HTTP. The others poll
for the torrent five times a second, connect to all peers, verify each piece, create `done`, and keep seeding.
"""

import functools
import http.server
import sys
import threading
import time
import urllib.request
from pathlib import Path

import libtorrent

PORT, POLL_S = 6881, 0.2
own, origin, scale, *peers = sys.argv[1:]
settings = {
    "listen_interfaces": f"{own}:{PORT}",
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_outgoing_utp": False,
    "enable_incoming_utp": False,
    "allow_multiple_connections_per_ip": True,
    "torrent_connect_boost": 100,
    "connection_speed": 100,
    "unchoke_slots_limit": -1,
    "listen_queue_size": 100,
}


def main() -> None:
    session = libtorrent.session(settings)
    Path("ready").touch()
    if own == origin:
        quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
        server = http.server.ThreadingHTTPServer((own, 80), functools.partial(quiet, directory="public"))
        Path("public").mkdir()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        encoded = cut(Path(sys.stdin.readline().strip()))
    else:
        encoded = ask(f"http://{origin}/torrent")
    options = libtorrent.add_torrent_params()
    options.ti, options.save_path = libtorrent.torrent_info(encoded), "."
    options.flags &= ~(libtorrent.torrent_flags.paused | libtorrent.torrent_flags.auto_managed)
    if own == origin:
        options.flags |= libtorrent.torrent_flags.seed_mode | libtorrent.torrent_flags.super_seeding
    handle = session.add_torrent(options)
    if own == origin:
        (Path("public") / "torrent.part").write_bytes(encoded)
        (Path("public") / "torrent.part").rename("public/torrent")
    for peer in peers:
        if peer != own:
            handle.connect_peer((peer, PORT))
    while not handle.status().is_seeding:
        time.sleep(0.01)
    Path("done").touch()
    while True:
        time.sleep(60)


def cut(path: Path) -> bytes:
    """Rename `path` to `file`. Return its torrent of version 1 (SHA-1), with pieces of about 1 MiB times the scale."""
    path.rename("file")
    files = libtorrent.file_storage()
    files.add_file("file", Path("file").stat().st_size)
    piece_bytes = max(1 << round(float(scale) * 2**20 - 1).bit_length(), 2**14)
    torrent = libtorrent.create_torrent(files, piece_bytes, flags=libtorrent.create_torrent.v1_only)
    libtorrent.set_piece_hashes(torrent, ".")
    return libtorrent.bencode(torrent.generate())


def ask(url: str) -> bytes:
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.read()
        except OSError:
            time.sleep(POLL_S)


main()
