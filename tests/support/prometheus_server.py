"""A real Prometheus that scrapes what a test runs and answers its queries, and the dashboard's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from tests.support.house import ROOT
from tests.support.service_process import free_port

DASHBOARD = ROOT / "deploy" / "grafana" / "pdmesh.json"
CONFIG = ROOT / "deploy" / "prometheus.yml"

BINARY = shutil.which("prometheus")
"""None where it is not installed (Debian's package is called prometheus)."""

STARTS_WITHIN_S = 60.0


class Query(NamedTuple):
    """One query of the dashboard. legend_labels: what its legend shows of each series."""

    panel: str
    expression: str
    legend_labels: tuple[str, ...]


def dashboard_queries() -> list[Query]:
    """Every query of every panel, with the interval that Grafana would put in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        Query(
            panel["title"],
            target["expr"].replace("$__rate_interval", "1m"),
            tuple(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])),
        )
        for panel in panels
        for target in panel.get("targets", [])
    ]


class Prometheus:
    """Made by ``prometheus``."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url = url
        self._client = client

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate an instant query; its series, each with ``metric`` and ``value``."""
        async with self._client.get(
            f"{self._url}/api/v1/query", params={"query": expression}
        ) as response:
            answer = await response.json()
        assert answer["status"] == "success", (expression, answer)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    async def _until_ready(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._client.get(f"{self._url}/-/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def prometheus(
    targets: Mapping[str, Sequence[str]], folder: Path
) -> AsyncGenerator[Prometheus]:
    """Run it for the length of the block with the jobs of ``deploy/prometheus.yml``.

    targets: host:port of each, by job; every job must have some. folder: for its files.
    """
    assert BINARY is not None
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "1s"
    assert {job["job_name"] for job in config["scrape_configs"]} == set(targets)
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            BINARY,
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={url}",
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as client:
            server = Prometheus(f"http://{url}", client)
            async with asyncio.timeout(STARTS_WITHIN_S):
                await server._until_ready()
            yield server
    finally:
        process.kill()
        await process.wait()
