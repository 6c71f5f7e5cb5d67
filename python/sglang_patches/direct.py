"""Requests that go to the server that was named and nowhere else.

They may carry an API key, which a proxy that the shell names for other hosts would read, and a redirect take along.
"""

from __future__ import annotations

import urllib.request
from typing import Any


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """No request follows, so the redirect is raised as `urllib.error.HTTPError`."""


#: Opens as `urllib.request.urlopen` does, without proxies and redirects.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
