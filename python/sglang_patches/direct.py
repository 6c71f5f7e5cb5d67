"""Requests that go to the server that was named and nowhere else.

They may carry an API key, which a proxy that the shell names for other hosts would read, and a redirect take along.
"""

from __future__ import annotations

import urllib.request
from typing import Any
from urllib.parse import urlsplit

from sglang_patches.document.secrets import mask_text
from sglang_patches.errors import PatchError


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """No request follows, so the redirect is raised as `urllib.error.HTTPError`."""


#: Opens as `urllib.request.urlopen` does, without proxies and redirects.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)


def request(url: str, path: str, api_key: str = "") -> urllib.request.Request:
    """A GET of `path` at the server `url`, with its key if there is one. Raises PatchError where `url` is none."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise PatchError(f"{mask_text(url)}: not the URL of a server\n  expected   such as http://127.0.0.1:30000")
    made = urllib.request.Request(url.rstrip("/") + path)
    if api_key:
        made.add_header("Authorization", f"Bearer {api_key}")
    return made
