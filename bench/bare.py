"""The floor: the smallest server that aiohttp and prometheus_client make, with 260 series.

python bench/bare.py PORT
"""

from __future__ import annotations

import sys

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

FAMILIES = 20
SERIES = 13
"""Of each family."""


def registry() -> CollectorRegistry:
    """Make the series: names, labels and values as long as an exporter of GPUs has them."""
    made = CollectorRegistry()
    for family in range(FAMILIES):
        gauge = Gauge(f"bare_server_measured_value_{family}_bytes", "A value in bytes.", ["gpu", "uuid"], registry=made)
        for one in range(SERIES):
            gauge.labels(str(one), f"GPU-00000000-0000-4000-8000-{one:012d}").set(1.5e9 + one * 1024 + family)
    return made


def main() -> None:
    """Serve until the process is ended."""
    made = registry()

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(made), headers={"Content-Type": "text/plain; version=0.0.4"})

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
