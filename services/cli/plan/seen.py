"""What a live mesh has seen: from its gateway, from a file that ``pdmesh plan verify --keep``
wrote, or from a folder of ``pdmesh bench --output``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from services.cli.bench.endpoints import RECENT
from services.cli.bench.report import ReportedRequest
from services.cli.client import CannotRun, RunningGateway
from services.gateway.http.cluster_bodies import RecentRequest, RecentRequests
from services.planner.core.replay import SeenRequest, terms_of
from services.planner.rows import read_json, read_rows, read_text
from shared.errors import InvalidRequest
from shared.telemetry.lifetime import Receipt

_Receipt: Final = msgspec.defstruct(
    "_Receipt",
    [(name, kind, Receipt._field_defaults[name]) for name, kind in get_type_hints(Receipt).items()],
)


class _Server(msgspec.Struct):
    model: str


class _Report(msgspec.Struct):
    endpoints: list[_Server]
    mesh: Any = None


class SeenTraffic(NamedTuple):
    """Requests in order of arrival, and the mesh that they met; None = nobody tells. left_out: how
    many brought no token. num_retried: how many took more than one attempt. is_client: times are a
    client's, and so count its way to the gateway, too."""

    source: str
    model: str
    mesh: RecentRequests | None
    requests: list[SeenRequest]
    left_out: int = 0
    num_retried: int = 0
    is_client: bool = False


def ask_gateway(gateway: RunningGateway) -> RecentRequests:
    """Return what a gateway tells. Raises CannotRun, GatewayRefused."""
    return read_body(asyncio.run(gateway.ask(RECENT)), gateway.url)


def read_body(body: Any, url: str) -> RecentRequests:
    """Return a body of the gateway. Raises CannotRun: it is another release's."""
    try:
        return _told(body)
    except msgspec.ValidationError as error:
        raise CannotRun(
            f"{url} tells of its requests in other words than this release reads ({error}): use "
            "the pdmesh of its release"
        ) from None


def _told(body: Any) -> RecentRequests:
    told = msgspec.convert(body, RecentRequests)
    for it in told.requests:  # whose form is free there
        it.receipt = msgspec.structs.asdict(msgspec.convert(it.receipt, _Receipt))
    return told


def seen_by_gateway(mesh: RecentRequests, source: str, last_s: float | None = None) -> SeenTraffic:
    """Return what a gateway remembers. last_s: only what came in the last seconds.

    Raises CannotRun: no request brought a token.
    """
    since = 0.0 if last_s is None else mesh.now_s - last_s
    asked = sorted(
        (it for it in mesh.requests if it.arrived_s >= since), key=lambda it: it.arrived_s
    )
    found = [it for it in map(_seen, asked) if it is not None]
    if len(found) < 2:
        when = "" if last_s is None else f" in the last {last_s:g} s"
        raise CannotRun(
            f"{source} remembers {'one' if found else 'no'} request with a token{when}, two are "
            "the least to replay: send some (pdmesh bench), and ask again"
        )
    if not any(it.is_over for it in found):
        raise CannotRun(f"{source}: all {len(found)} requests go on: ask again when one has ended")
    retried = sum(it.receipt.get("attempts", 1) > 1 for it in asked)
    return SeenTraffic(source, mesh.model, mesh, found, len(asked) - len(found), retried)


def _seen(it: RecentRequest) -> SeenRequest | None:
    told = it.receipt
    ttft_s, num_output = told.get("ttft_s"), int(told.get("output_tokens", 0))
    if ttft_s is None or not num_output:
        return None
    tpot_s = float(told.get("tpot_s") or 0.0)
    return SeenRequest(
        at_s=it.arrived_s,
        num_prompt=max(1, int(told["prompt_tokens"])),
        num_output=num_output,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        is_whole=it.ended and not it.error,
        is_over=it.ended,
        num_cached=int(told.get("cached_tokens", 0)),
        worker=str(told.get("prefill", "")),
        terms=terms_of(
            ttft_s,
            tpot_s,
            num_output,
            gateway=told["queue_s"] + told["route_s"] + told["retry_s"],
            prefill_queue=told["prefill_queue_s"],
            prefill=told["prefill_s"],
            first_gap_s=float(told.get("first_step_s") or 0.0),
        ),
    )


def read_seen(path: Path, run: int | None, last_s: float | None) -> SeenTraffic:
    """Return what a file of ``--keep`` or a folder of ``pdmesh bench`` holds.

    Raises InvalidRequest: it is neither, or has holes. CannotRun: it cannot be read, or is empty.
    """
    if path.is_dir():
        return _read_folder(path, run)
    try:
        mesh = _told(msgspec.json.decode(read_text(path)))
    except msgspec.DecodeError as error:  # a ValidationError is one
        raise InvalidRequest(
            f"{path} is neither a file of `pdmesh plan verify --keep` nor a folder of `pdmesh "
            f"bench --output` ({str(error).rstrip('.').lower()})"
        ) from None
    return seen_by_gateway(mesh, str(path), last_s)


def _read_folder(folder: Path, run: int | None) -> SeenTraffic:
    table, report = folder / "requests.csv", folder / "report.json"
    try:
        told, rows = read_json(report, _Report), list(read_rows(table, ReportedRequest))
        model = told.endpoints[0].model
        runs = list(dict.fromkeys(row.run for _, row in rows))
        wanted = runs[-1] if run is None else str(run)
    except (InvalidRequest, IndexError) as error:
        raise InvalidRequest(
            f"{folder} is no folder of `pdmesh bench --output` ({error})"
        ) from None
    if wanted not in runs:
        raise InvalidRequest(f"{folder} has the runs {', '.join(runs)}, and not --run {wanted}")
    own = [(line, row) for line, row in rows if row.run == wanted]
    found: list[SeenRequest] = []
    due_s = 0.0
    for index, (line, row) in enumerate(own):
        if row.index != index:
            raise InvalidRequest(f"{table}:{line}: request {index} is missing: the run has a hole")
        if row.due_s < due_s:
            early = f"arrives {due_s - row.due_s:g} s before the line above: sort it"
            raise InvalidRequest(f"{table}:{line}: {early}")
        due_s = row.due_s
        if row.ttft_s is not None and row.output:
            found.append(
                SeenRequest(
                    at_s=row.due_s,
                    num_prompt=max(1, row.input or row.input_asked),
                    num_output=row.output,
                    ttft_s=row.ttft_s,
                    tpot_s=row.tpot_s or 0.0,
                    is_whole=row.end == "complete",
                    num_cached=row.cached,
                )
            )
    if len(found) < 2:
        raise CannotRun(f"{table}: run {wanted} has {len(found)} answers, two are the least")
    mesh = None if told.mesh is None else read_body(told.mesh, str(report))
    return SeenTraffic(
        f"{folder}, run {wanted}", model, mesh, found, len(own) - len(found), 0, True
    )
