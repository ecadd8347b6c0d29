"""aiohttp, as every other module gets it: without the system's certificate authorities.

When it is imported, aiohttp reads all of them into two TLS contexts that it keeps for good (aio-libs/aiohttp's
``connector.py``): a third of the time that the import takes, and 2 MB of memory in every replica. Nothing here uses
these contexts: a server's certificate is verified by one that `sidecar.serverinfo` makes where there is one to verify.
Used all the same, they would trust nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["AbstractResolver", "Handler", "HttpProcessingError", "Middleware", "ResolveResult", "aiohttp", "web"]


@contextmanager
def _no_authorities() -> Iterator[None]:
    """Point OpenSSL's default paths (SSL_CTX_set_default_verify_paths(3)) at nothing meanwhile."""
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, os.devnull))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


with _no_authorities():
    import aiohttp
    from aiohttp import web
    from aiohttp.abc import AbstractResolver, ResolveResult
    from aiohttp.http import HttpProcessingError
    from aiohttp.typedefs import Handler, Middleware
