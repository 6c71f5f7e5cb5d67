"""Whether the model hub can be reached from here: asked before a start that would ask it in vain for a minute."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

_HUB = "https://huggingface.co"
_PORTS = {"http": 80, "https": 443, "socks": 1080, "socks4": 1080, "socks5": 1080, "socks5h": 1080}
# Seconds before each try: a name server that is busy, or a network that comes up, is none that is not there.
_WAITS = (0.0, 1.0, 2.0)
# Seconds after which there is no further try: what drops packets has taken them already.
_PATIENCE = 5.0
_TIMEOUT = 10.0  # as huggingface_hub's own


def unreachable(environ: Mapping[str, str] | None = None) -> str:
    """Why nothing that huggingface_hub would connect to accepts a connection; empty where something does.

    What answers there is not looked at, so a hub that is reached may still refuse. Also empty where HF_ENDPOINT is no
    URL, of which nothing can be told.

    Args:
        environ: of whoever would ask the hub (HF_ENDPOINT, HF_HUB_ETAG_TIMEOUT, proxies); None: this process's.
    """
    given = os.environ if environ is None else environ
    hub = _address(given.get("HF_ENDPOINT") or _HUB)
    if hub is None:
        return ""
    begun, why = time.monotonic(), ""
    for wait in _WAITS:
        time.sleep(wait)
        refused = {}
        # A proxy may know a hub that this machine does not, and an exception from it one that the proxy does not.
        for name, place in {_shown(hub): hub, **_proxies(hub.scheme, given)}.items():
            try:
                socket.create_connection((place.hostname, _port(place)), _timeout(given)).close()
                return ""
            except (OSError, UnicodeError) as error:  # the second: a name that is none
                refused[name] = getattr(error, "strerror", None) or str(error)
        why = "; ".join(f"{name} cannot be reached: {reason}" for name, reason in refused.items())
        if time.monotonic() - begun > _PATIENCE:
            break
    return why


def _address(url: str) -> SplitResult | None:
    """None where `url` names no host and port."""
    try:
        found = urlsplit(url)
        known = found.hostname and (found.port or found.scheme in _PORTS)
    except ValueError:
        return None
    return found if known else None


def _port(place: SplitResult) -> int:
    return place.port or _PORTS[place.scheme]


def _shown(place: SplitResult) -> str:
    """Without a user's name and password."""
    return f"{place.scheme}://{place.hostname}" + (f":{place.port}" if place.port else "")


def _proxies(scheme: str, environ: Mapping[str, str]) -> dict[str, SplitResult]:
    found = {}
    for name in (f"{scheme}_proxy", "all_proxy"):
        for spelled in (name, name.upper()):
            if url := environ.get(spelled):
                place = _address(url if "://" in url else f"http://{url}")
                if place is not None:
                    found[f"{spelled}={_shown(place)}"] = place
    return found


def _timeout(environ: Mapping[str, str]) -> float:
    asked = environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return max(float(asked), 1.0) if asked.isdecimal() else _TIMEOUT
