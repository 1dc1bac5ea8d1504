"""nginx at the origin, alone or with caching relays.

Clients poll for the file five times a second, and verify its BLAKE3 hash at the end.
"""

import hashlib
from pathlib import Path

from .stage import Stage

CONF = """daemon off; user root; worker_processes 1; pid nginx.pid;
events {{ worker_connections 4096; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; proxy_temp_path temp;
  {servers}
}}
"""
ORIGIN = "server {{ listen {address}:80; root {folder}/public; }}"

# A relay's port 80 serves clients. It caches slices, and fetches each from port 81 of the relay that owns the slice. Port 81
# fetches it from the origin. So the origin sends each slice once, however many clients request it at the same time.
RELAY = """
  proxy_cache_path {folder}/edge keys_zone=edge:16m inactive=1h use_temp_path=off;
  proxy_cache_path {folder}/inner keys_zone=inner:16m inactive=1h use_temp_path=off;
  upstream inner {{ hash $slice_range consistent; {relays} keepalive 64; }}
  upstream origin {{ server {origin}:80; keepalive 64; }}
  proxy_http_version 1.1; proxy_set_header Connection "";
  proxy_cache_valid 200 206 1h;
  proxy_cache_lock on; proxy_cache_lock_timeout 300s; proxy_cache_lock_age 300s;
  proxy_connect_timeout 5s; proxy_read_timeout 30s;
  server {{
    listen {address}:80;
    location / {{
      slice {slice_bytes}; proxy_set_header Range $slice_range;
      proxy_cache edge; proxy_cache_key $uri$slice_range; proxy_pass http://inner;
    }}
  }}
  server {{
    listen {address}:81;
    location / {{
      proxy_set_header Range $http_range;
      proxy_cache inner; proxy_cache_key $uri$http_range; proxy_pass http://origin;
    }}
  }}
"""

STAR_CLIENT = """
until curl -sf -C - --connect-timeout 5 -o file http://{origin}/file; do sleep 0.2; done
b3sum -c sum && touch done
"""
TREE_CLIENT = """
until curl -sf --connect-timeout 5 -o meta4 http://{origin}/meta4; do sleep 0.2; done
aria2c -q -M meta4 -s 16 -x 16 -k 1M --file-allocation=none --max-tries=0 --retry-wait=1 --connect-timeout=5 --timeout=30 \\
  && b3sum -c sum && touch done
"""
META4 = """<?xml version="1.0" encoding="UTF-8"?>
<metalink xmlns="urn:ietf:params:xml:ns:metalink"><file name="file"><size>{size}</size>
<pieces type="sha-256" length="{piece}">{hashes}</pieces>{urls}</file></metalink>
"""


class Star:
    """Every client fetches the file from the origin with curl, without relays. So the origin must send it once per client,
    and 16 clients take about 16 times the bound that `__main__.py` defines."""

    def start(self, stage: Stage) -> None:
        serve(stage, "origin", ORIGIN)
        for name in stage.network.clients():
            stage.start(name, ["sh", "-c", STAR_CLIENT.format(origin=stage.address("origin"))])

    def publish(self, stage: Stage) -> None:
        stage.file.rename(stage.at("origin") / "public" / "file")


class Tree:
    """Relays cache slices of the file, as a CDN's do (RELAY). Clients fetch from all relays with aria2 over 16 connections.
    By default aria2 would cut the file into 5 parts and use one connection per server. The origin publishes a Metalink with
    the SHA-256 of each slice. Without these hashes the file would be wrong after a relay dies in the middle of a slice,
    because nginx continues with the next slice."""

    def start(self, stage: Stage) -> None:
        serve(stage, "origin", ORIGIN)
        relays = stage.network.relays()
        known = {
            "origin": stage.address("origin"),
            "relays": " ".join(f"server {stage.address(name)}:81;" for name in relays),
            "slice_bytes": piece_bytes(stage),
        }
        for name in relays:
            serve(stage, name, RELAY, **known)
        for name in stage.network.clients():
            stage.start(name, ["sh", "-c", TREE_CLIENT.format(origin=stage.address("origin"))])

    def publish(self, stage: Stage) -> None:
        piece, data = piece_bytes(stage), stage.file.read_bytes()
        cuts = [data[at : at + piece] for at in range(0, len(data), piece)]
        hashes = "".join(f"<hash>{hashlib.sha256(cut).hexdigest()}</hash>" for cut in cuts)
        urls = "".join(f"<url>http://{stage.address(name)}/file</url>" for name in stage.network.relays())
        public = stage.at("origin") / "public"
        stage.file.rename(public / "file")
        (stage.folder / "meta4").write_text(META4.format(size=len(data), piece=piece, hashes=hashes, urls=urls))
        (stage.folder / "meta4").rename(public / "meta4")


def piece_bytes(stage: Stage) -> int:
    """Return the size of a slice: 1 MiB times the scale, rounded up to a power of two, but at least 64 KiB."""
    return max(1 << (round(stage.scale * 2**20) - 1).bit_length(), 2**16)


def serve(stage: Stage, name: str, servers: str, **known: object) -> None:
    folder = stage.at(name)
    (folder / "public").mkdir()
    text = servers.format(address=stage.address(name), folder=folder, **known)
    (folder / "nginx.conf").write_text(CONF.format(servers=text))
    stage.start(name, ["nginx", "-p", folder, "-c", Path("nginx.conf"), "-e", "stderr"])
    stage.wait([name], "nginx.pid")
