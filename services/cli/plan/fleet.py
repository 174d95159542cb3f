"""``pdmesh plan fleet``: which mesh to buy, or what a budget gets."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Annotated, Any, Final

from cyclopts import Parameter

from services.cli.bench.view import limits_text
from services.cli.plan.explain import MOST_RUNS, Explained, WhatIfFlag, explain, goodput, lines
from services.cli.plan.sim_flags import SimFlags
from services.cli.plan.sim_report import OutputFlag, begin_report, draw_lines, report_files
from services.cli.plan.view import Kept, progress, require_ranges, say_how_long
from services.cli.sources import QUIET, JsonFlag
from services.cli.words import plain_console, plain_table, print_json, print_lines
from services.planner.core.bounds import WorkerBound
from services.planner.core.fleet import (
    MeshOffer,
    Price,
    Search,
    best_goodput,
    candidates,
    cheapest,
)
from services.planner.core.limits import binding_limit
from services.planner.core.mesh_text import DEGREES, MeshShape, Unit
from services.planner.core.roofline import DEVICES
from services.planner.mesh_run import MeshRun
from shared.errors import InvalidRequest

FEW_DEVICES: Final = 16
MOST_DEVICES: Final = 128


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """What there is to buy.

    Parameters
    ----------
    devices
        Kinds that a worker may be of, with a roofline's times: a100,h100. Default: --device, or the
        time model's.
    tp
        Degrees of tensor parallelism that a worker may have: 1,2,4.
    pp
        Numbers of pipeline stages that a worker may have: 1,2,4. No engine of pdmesh runs them.
    price
        Euros of one device and hour: a100=1.80,h100=3.20. Without, what is counted is devices.
    watts
        Count watts by data sheets instead.
    max_devices
        Most devices of a mesh; default 16, or what the budget buys (128 at most).
    budget
        Find the best goodput for so many devices, euros an hour or watts, instead of the cheapest
        mesh for --rate.
    mixed
        Whether workers for prompts and answers alike are among them.
    """

    devices: Annotated[str, QUIET] = ""
    tp: str = "1"
    pp: str = "1"
    price: Annotated[str, QUIET] = ""
    watts: Annotated[bool, Parameter(negative="")] = False
    max_devices: int | None = None
    budget: float | None = None
    mixed: bool = True

    def units(self, flags: SimFlags) -> list[Unit]:
        """Return what a worker may be. Raises InvalidRequest."""
        names = [name for name in self.devices.lower().replace(" ", "").split(",") if name]
        for name in names:
            if name not in DEVICES:
                raise InvalidRequest(f"--devices: known are {', '.join(DEVICES)}, not {name!r}")
        tps, pps = _degrees("--tp", self.tp), _degrees("--pp", self.pp)
        most, budget = self.max_devices, self.budget
        require_ranges(
            ("--max-devices", most is None or 1 <= most <= MOST_DEVICES, f"1..{MOST_DEVICES}"),
            ("--budget", budget is None or 0 < budget < 1e9, "above 0 and below 1e9"),
        )
        units = [Unit(*words) for words in product(names or [""], tps, pps)]
        fitting: list[Unit] = []
        for unit in units:
            try:
                flags.times.unit(unit)
            except InvalidRequest as error:
                if "do not fit" not in error.message or len(units) == 1:
                    raise
                continue
            fitting.append(unit)
        if not fitting:
            raise InvalidRequest(
                f"the weights of {flags.times.kv.name} fit into none of these: a higher "
                "--tp or --pp"
            )
        return fitting

    def most_devices(self, price: Price) -> int:
        """Return how many a mesh may have: as given, or as many as the budget buys."""
        if self.max_devices is not None or self.budget is None:
            return self.max_devices or FEW_DEVICES
        return min(MOST_DEVICES, int(self.budget / min(price.of.values()) + 1e-9))

    def priced(self, flags: SimFlags, units: list[Unit]) -> Price:
        """Return what a device costs, by its name in a mesh. Raises InvalidRequest."""
        own = {it.device: it.device or (flags.times.device or "").lower() for it in units}
        if self.watts and self.price:
            raise InvalidRequest("give --price or --watts, not both")
        if self.watts:
            if not DEVICES.keys() >= {*own.values()}:
                raise InvalidRequest("--watts needs --device or --devices: whose they are")
            return Price({name: DEVICES[device].watts for name, device in own.items()}, "W")
        if not self.price:
            if len(own) > 1:
                raise InvalidRequest(
                    "several kinds of devices need --price (a100=1.80,h100=3.20) or --watts: a "
                    "number of devices compares nothing"
                )
            return Price(dict.fromkeys(own, 1.0), "devices")
        given: dict[str, float] = {}
        for word in self.price.lower().replace(" ", "").split(","):
            name, _, number = word.partition("=")
            if name in given:
                raise InvalidRequest(f"--price has two prices of {name}: give one")
            try:
                given[name] = float(number)
            except ValueError:
                given[name] = 0.0
            if not 0 < given[name] < 1e9:
                raise InvalidRequest(f"--price must be like a100=1.80,h100=3.20, not {word!r}")
        if "" in own.values():  # of a profile, or of times that are given
            if len(given) > 1:
                raise InvalidRequest("--price has one price, of the device whose times these are")
            return Price({"": next(iter(given.values()))}, "€/h")
        if missing := sorted(set(own.values()) - given.keys()):
            raise InvalidRequest(f"--price says nothing of {', '.join(missing)}")
        return Price({name: given[device] for name, device in own.items()}, "€/h")


@dataclass(slots=True)
class _Found:
    """Everything that a search came to, whole at any moment."""

    search: Search = field(default_factory=Search)
    run: MeshRun | None = None
    explained: Explained = field(default_factory=Explained)
    kept: Kept = field(default_factory=Kept)


def fleet(
    *,
    flags: SimFlags = SimFlags(),  # noqa: B008  (frozen)
    fleet_flags: FleetFlags = FleetFlags(),
    what_if: WhatIfFlag = True,
    output: OutputFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Find the cheapest mesh that attains, or the best goodput for a budget of devices, euros or
    watts.

    Closed forms rule out what cannot attain; the rest is simulated by rising cost until two meshes
    attain. Ctrl-C shows what has been found.
    """
    flags.check()
    begin_report(output)
    units = fleet_flags.units(flags)
    price = fleet_flags.priced(flags, units)
    if impossible := flags.impossible(units):
        raise InvalidRequest("; ".join(impossible))
    bounds = flags.bounds(units)
    most = fleet_flags.most_devices(price)
    offers = candidates(bounds, price, most_devices=most, has_mixed=fleet_flags.mixed)
    budget = fleet_flags.budget
    if not offers or (budget is not None and min(it.cost for it in offers) > budget):
        raise InvalidRequest(f"that is too little for any mesh: at most {most} of these devices")
    if fleet_flags.max_devices is None and budget is not None and most == MOST_DEVICES:
        print(f"no mesh has more than {most} devices here, whatever the budget", file=sys.stderr)
    found = _Found()
    with found.kept:
        _search(flags, fleet_flags, offers, units, found)
        if what_if and found.search.chosen is not None:
            assert found.run is not None
            explain(flags.variant(rate=found.run.rate), found.run, found.explained)
    facts = _facts(flags, price, found, len(offers))
    if output is not None and found.search.tried:
        report_files(flags, [found.run] if found.run else [], output, facts)
        points = [(one.cost, rate, str(one.shape)) for one, rate in found.search.tried]
        draw_lines(
            output / "cost.svg",
            f"requests/s found to attain, over cost in {price.unit}",
            (price.unit, "requests/s"),
            {"tried": points},
        )
    if as_json:
        print_json(facts)
    else:
        _show(flags, fleet_flags, price, found, bounds)
    return found.kept.exit_code(is_good=found.search.chosen is not None)


def _search(
    flags: SimFlags,
    fleet_flags: FleetFlags,
    offers: list[MeshOffer],
    units: list[Unit],
    found: _Found,
) -> None:
    search, budget = found.search, fleet_flags.budget
    requests = flags.requests_told(units)
    largest = max(offers, key=lambda one: one.bound).shape
    run_s = flags.trial_s(largest, requests)
    if budget is None:
        possible = sum(one.bound >= flags.rate for one in offers)
        fewer = "the second mesh that attains ends it, --max-devices and --num-requests shorten it"
        say_how_long(possible, run_s, fewer)
        with progress("fleet, by rising cost", possible) as one_more:

            def attains(shape: MeshShape) -> bool:
                run = flags.run(shape, requests)
                one_more()
                return run.attains

            cheapest(offers, flags.rate, attains, search)
    else:
        within = sum(one.cost <= budget for one in offers)
        say_how_long(within * MOST_RUNS // 2, run_s, "--budget, --num-requests shorten it")
        with progress("fleet, by falling bound", within) as one_more:

            def rate_of(shape: MeshShape, above: float) -> float:
                rate = goodput(flags, shape, flags.rate, above=above)
                one_more()
                return rate

            best_goodput(offers, budget, rate_of, search)
    shown = search.chosen or max(
        (one for one, _ in search.tried), key=lambda one: one.bound, default=None
    )
    if shown is not None:
        rate = flags.rate if budget is None else search.goodput_of(shown) or flags.rate
        found.run = flags.variant(rate=rate).run(shown.shape)
        found.explained = Explained(binding_limit(found.run.felt))


def _facts(flags: SimFlags, price: Price, found: _Found, num_offers: int) -> dict[str, Any]:
    search = found.search

    def told(one: MeshOffer | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "mesh": str(one.shape),
            "cost": one.cost,
            "bound": one.bound,
            "rate": search.goodput_of(one),
        }

    return {
        "chosen": told(search.chosen),
        "runner_up": told(search.runner_up),
        "cost_unit": price.unit,
        "is_whole": found.kept.is_whole,
        "num_offers": num_offers,
        "num_ruled_out": search.num_ruled_out,
        "tried": [told(one) for one, _ in search.tried],
        "run": None if found.run is None else flags.variant(rate=found.run.rate).facts(found.run),
        "what_if": asdict(found.explained),
    }


def _show(
    flags: SimFlags,
    fleet_flags: FleetFlags,
    price: Price,
    found: _Found,
    bounds: dict[Unit, WorkerBound],
) -> None:
    console, search = plain_console(), found.search
    goal = f"{flags.attainment:.0%} within {limits_text(flags.slo)}"
    asked = (
        f"cheapest for {flags.rate:g} requests/s"
        if fleet_flags.budget is None
        else f"best goodput for {price.text(fleet_flags.budget)}"
    )
    console.print(f"{asked} of {flags.workload}, {goal}; seed {flags.seed}")
    table = plain_table("mesh", price.unit, "cannot exceed", "attains", left=("mesh",))
    for one, rate in search.tried[-12:]:
        word = f"{rate:.3g}/s" if rate else "no"
        mark = " *" if one is search.chosen else ""
        table.add_row(f"{one.shape}{mark}", f"{one.cost:g}", f"{one.bound:.3g}/s", word)
    console.print(table)
    if search.chosen is None:
        console.print("nothing was found that attains" + _why_nothing(flags, bounds, found))
        if found.run is not None:
            console.print(f"{found.run.shape} attains {found.run.attained:.1%}")
        print_lines(lines(found.explained, flags))
    else:
        chosen, second = search.chosen, search.runner_up
        console.print(
            f"{chosen.shape}: {price.text(chosen.cost)}, attains "
            f"{search.goodput_of(chosen):.3g} requests/s"
        )
        console.print(
            f"runner-up: {second.shape}, {price.text(second.cost)}, "
            f"{search.goodput_of(second):.3g} requests/s"
            if second
            else "runner-up: none within these limits that is not the chosen one and more"
        )
        print_lines([*lines(found.explained, flags), *flags.about_times([chosen.shape])])
    console.print(f"{len(search.tried)} simulated, {search.num_ruled_out} ruled out")


def _why_nothing(flags: SimFlags, bounds: dict[Unit, WorkerBound], found: _Found) -> str:
    if not found.kept.is_whole:
        return " yet"
    best = max(bounds.values(), key=lambda it: min(it.prompts, it.answers))
    return (
        f": one worker does the prompts of at most {best.prompts:.3g} requests/s, or the answers "
        f"of {best.answers:.3g}; more --max-devices, a lower --rate or wider limits"
    )


def _degrees(flag: str, text: str) -> list[int]:
    found = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not {*found} <= {*DEGREES}:
        known = ",".join(map(str, DEGREES))
        raise InvalidRequest(f"{flag} must be degrees out of {known}, not {text!r}")
    return found
