"""Whether a server can bind its port at the address it will, and who keeps it from that."""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from sglang_patches import api_key, processes

#: Where upstream listens unless it is told otherwise (server_args.py).
DEFAULT_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Refused:
    """Why a port cannot be bound: what was `seen`, and the `remedy`; `in_use`: another port of the host might do."""

    seen: str
    remedy: str
    in_use: bool = False


def bound_host(words: Sequence[str]) -> str:
    """Where a server with these arguments listens: ``--host``, or that of the file of its ``--config``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default=api_key.config(words)[1].get("host") or DEFAULT_HOST)
    return str(parser.parse_known_args(list(words))[0].host)


def reachable(host: str) -> str:
    """The address in a URL by which this machine reaches a server that binds ``host``."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def refused(host: str, port: int) -> Refused | None:
    """Why a server cannot listen on this port of `host`, an address or a name; None if it can.

    Tried as asyncio's ``create_server`` binds, which uvicorn calls: each address of the name, IPv6 without IPv4.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return Refused(
            f"port {port} cannot be bound at {host!r}, which is no address and no known name: {error}",
            "--host an address of this machine (ip -br address), 127.0.0.1 for itself alone, or 0.0.0.0 for all",
        )
    elsewhere: list[str] = []
    for family, kind, protocol, _, place in dict.fromkeys(found):
        address = str(place[0])
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return _held(address if host in ("", address) else f"{address} ({host})", address, port)
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                elsewhere.append(address)
                continue
            return Refused(
                f"port {port} cannot be bound at {address}: {os.strerror(error.errno or 0)}",
                "a --port from 1024 on" if error.errno == errno.EACCES else "another --port or --host",
            )
    if len(elsewhere) == len(dict.fromkeys(found)):
        return Refused(
            f"port {port} cannot be bound at {', '.join(dict.fromkeys(elsewhere))}, which this machine has not"
            + ("" if host in elsewhere else f" ({host})"),
            "--host an address of this machine (ip -br address), 127.0.0.1 for itself alone, or 0.0.0.0 for all",
        )
    return None


def listeners(port: int) -> list[Any]:
    """What listens on this port of any address, as `psutil.net_connections` tells: `laddr.ip`, and `pid` or None."""
    return [
        entry
        for entry in psutil.net_connections("inet")
        if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port
    ]


def _held(shown: str, address: str, port: int) -> Refused:
    """The refusal of an address that is in use, with its holder as far as the system tells."""
    entries: list[Any] = []
    with contextlib.suppress(psutil.Error, OSError):
        entries = listeners(port)
    here = [entry for entry in entries if _overlap(address, entry.laddr.ip)] or entries
    pids = sorted({entry.pid for entry in here if entry.pid})
    seen = f"port {port} is in use on {shown}"
    if not pids:
        who = "a process that this user may not see" if here else "a connection"
        return Refused(f"{seen} by {who}", f"another --port; as root, `ss -atnp 'sport = :{port}'` names it", True)
    holders = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    told = ", ".join(f"pid {holder.pid} ({processes.shown(holder)})" for holder in holders)
    if any(processes.is_server(holder) for holder in holders):
        return Refused(f"{seen} by {told}", f"another --port, or: sglang-patches stop --port {port}", True)
    return Refused(f"{seen} by {told or 'a process that has just ended'}", "another --port, or end that process", True)


def _overlap(wanted: str, taken: str) -> bool:
    """Whether a listener at `taken` can keep `wanted` from being bound; one at ``::`` may take IPv4 as well."""
    one, other = (ipaddress.ip_address(text.partition("%")[0]) for text in (wanted, taken))
    if str(other) == "::":
        return True
    return one.version == other.version and (one == other or one.is_unspecified or other.is_unspecified)
