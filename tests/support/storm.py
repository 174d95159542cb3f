"""A storm of faults on a whole mesh under virtual time. What the mesh is, what clients ask and what
befalls it are drawn from one seed, so that settings meet which no other test brings together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from services.gateway.limits import seed_of_choice
from shared.bounds import OverloadName, RoutingPolicyName
from shared.engine.fake import FakeModel, FakeTiming
from shared.errors import DeadlinePassed, MeshError, Overloaded, WorkerLost, WouldBeLate
from shared.messages.columns import pack_u32
from shared.request import SamplingParams
from tests.support.fake_reference import fake_answer
from tests.support.virtual_loop import run_virtual
from tests.support.whole_mesh import RunningGateway, whole_mesh
from tests.support.worker_mesh import RunningWorker, a_prompt

KINDS = ["apart", "either", "colocated", "mixed"]
"""Of meshes: one role each; workers that do either; colocated ones; colocated beside prefill."""

NUM_CLIENTS = 30

MAX_TOKENS = 280
"""Of a prompt and its answer: the smallest pool holds one, and no more."""

TENANTS = ("red", "green", "blue")

TENANTS_TOML = """
[tenants.red]
weight = 9
[tenants.green]
max_running = 2
[tenants.blue]
ttft_ms = 2000.0
tpot_ms = 500.0
"""

PATIENCE_S = 300.0
"""Of a client; whoever runs out of it was forgotten by somebody."""

FAST = 1e9
"""Bytes/s. Canaries need a link of ordinary speed."""


def storm(seed: int, kind: str, folder: Path) -> str:
    """Run one storm and return a digest of everything that clients saw, and when.

    Every answer must be exact, as far as it came, or end with an error that says what happened;
    when it is over every gateway must answer, and nothing may be held. folder: for files of tiers.
    """
    drawn = Storm(seed, kind, folder)
    run_virtual(drawn.run())
    return drawn.history.hexdigest()


class Storm:
    """Made by ``storm``. history: a hash of what clients saw."""

    def __init__(self, seed: int, kind: str, folder: Path) -> None:
        self.history = hashlib.sha256()
        self._seed = seed
        self._chance = chance = random.Random(f"{kind}/{seed}")
        self._model = FakeModel(max_model_len=2048, eos_every=chance.choice([0, 0, 25]))
        self._keys = chance.choice([(), (), TENANTS])
        self._roots = [a_prompt(chance.randrange(20, 120), seed=it) for it in range(3)]
        prefill = _a_worker(chance, folder / "prefill")
        decode = _a_worker(chance, folder / "decode")
        if kind == "either":
            prefill["movable"] = decode["movable"] = True
        if kind in ("colocated", "mixed"):
            decode["colocated"] = True
        self._options: dict[str, Any] = {
            "num_gateways": chance.choice([1, 1, 2, 3]),
            "num_prefill": 0 if kind == "colocated" else chance.choice([1, 2, 2, 3]),
            "num_decode": chance.choice([1, 2, 2, 3]),
            "gateway": _a_gateway(chance) | self._doors(folder),
            "prefill": prefill,
            "decode": decode,
            "timing": FakeTiming(
                base_s=chance.choice([0.002, 0.01, 0.02]),
                prefill_token_s=chance.choice([2e-5, 5e-4, 1e-3]),
            ),
        }

    def _doors(self, folder: Path) -> dict[str, Any]:
        """The gateway's flags that tell tenants apart."""
        if not self._keys:
            return {}
        digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in TENANTS}
        (folder / "keys").write_text("".join(f"{it}:{digests[it]}\n" for it in TENANTS))
        (folder / "tenants.toml").write_text(TENANTS_TOML)
        return {"api_keys": folder / "keys", "tenants": folder / "tenants.toml"}

    async def run(self) -> None:
        """The storm, and what is left after it."""
        async with whole_mesh(**self._options, model=self._model, seed=self._seed) as mesh:
            self._mesh = mesh
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._faults())
                if "movable" in self._options["decode"]:
                    tasks.create_task(self._move_about())
                for number in range(NUM_CLIENTS):
                    tasks.create_task(self._client(number))
            mesh.network.fabric.heal()
            self._set_link(FAST, 0.0005)
            for worker in mesh.workers:
                mesh.fabric.thaw(worker.transport_address)
            await mesh.until(lambda: not any(it.stop.is_set() for it in mesh.workers))
            gateways = self._gateways()
            await mesh.until(lambda: all(it.members.table.sides.num_pairs for it in gateways))
            await asyncio.sleep(5.0)  # until nobody is thought to be silent any more
            for gateway in gateways:
                await self._ask(gateway)
            for worker in mesh.workers:
                for level in worker.worker.tiers.levels if worker.worker.tiers else ():
                    level.tier.check_integrity()

    def _gateways(self) -> list[RunningGateway]:
        return [it for it in self._mesh.gateways if it.lives and not it.stop.is_set()]

    # --- clients ---------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        chance = self._chance
        await asyncio.sleep(chance.uniform(0, 7))
        gateway = chance.choice([it for it in self._mesh.gateways if it.lives])
        leave_after = chance.choice([None, None, None, None, None, 1, 4])
        terms = {
            "ttft_ms": chance.choice([None, None, None, None, 50.0, 500.0, 3000.0]),
            "tpot_ms": chance.choice([None, None, None, None, 10.0, 100.0]),
            "priority": chance.choice([None, None, None, 0, 7]),
            "cache_salt": chance.choice(["", "", "a", "b"]),
        }
        timeout_s = chance.choice([*[PATIENCE_S] * 8, 0.2, 3.0])
        said = await self._ask(gateway, terms, leave_after=leave_after, timeout_s=timeout_s)
        self.history.update(f"{number} {said}".encode())

    async def _ask(
        self,
        gateway: RunningGateway,
        terms: dict[str, Any] | None = None,
        *,
        leave_after: int | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> str:
        """Have one answer, checked. terms: whoever brings none must be answered."""
        chance, mesh = self._chance, self._mesh
        root = chance.choice(self._roots) if chance.random() < 0.5 else []
        prompt = root + a_prompt(chance.randrange(1, 120), seed=chance.randrange(5))
        params = _sampling(chance)
        sampling = SamplingParams(**{**params, "seed": seed_of_choice(params["seed"], 0)})
        right, _ = fake_answer(prompt, sampling, model=self._model)
        if "stop_token_ids" in params:
            params["stop_token_ids"] = pack_u32(params["stop_token_ids"])
        key = {"authorization": f"Bearer {chance.choice(self._keys)}"} if self._keys else None
        answer = await mesh.ask(
            prompt,
            params.pop("max_tokens"),
            gateway=mesh.gateways.index(gateway),
            terms=terms,
            metadata=key,
            leave_after=leave_after,
            timeout_s=timeout_s,
            **params,
        )
        assert answer.token_ids == right[: len(answer.token_ids)]
        if answer.error is None:
            assert answer.token_ids == right or leave_after is not None
        elif gateway.lives and not gateway.stop.is_set():
            assert terms is not None, answer.error
            allowed = WorkerLost | Overloaded | WouldBeLate
            if timeout_s < PATIENCE_S:
                allowed |= DeadlinePassed
            assert isinstance(answer.error, allowed), answer.error
        return str(answer)

    # --- what befalls them -----------------------------------------------------------------------

    async def _faults(self) -> None:
        chance = self._chance
        faults: list[Callable[[RunningWorker], Coroutine[Any, Any, None]]] = [
            *(self._kill, self._kill, self._drain, self._lose_gateway, self._drain_gateway),
            *(self._freeze, self._cut_off, self._hold_back, self._break_streams),
            *(self._slow_down, self._slow_down),
        ]
        for _ in range(chance.randrange(3, 10)):
            await asyncio.sleep(chance.uniform(0.1, 1.3))
            fault = chance.choice(faults)
            await fault(chance.choice([it for it in self._mesh.workers if not it.stop.is_set()]))

    async def _kill(self, victim: RunningWorker) -> None:
        await self._mesh.kill(victim)
        await asyncio.sleep(self._chance.choice([0.0, 1.0, 2.0]))
        await self._start_in_place_of(victim)

    async def _drain(self, victim: RunningWorker) -> None:
        victim.stop.set()
        await self._start_in_place_of(victim)

    async def _start_in_place_of(self, victim: RunningWorker) -> None:
        self._set_link(FAST, 0.0005)
        await self._mesh.start_worker(victim.host.partition("-")[0])

    async def _lose_gateway(self, _: RunningWorker) -> None:
        await self._mesh.kill(self._chance.choice(self._gateways()))
        await self._mesh.start_gateway()

    async def _drain_gateway(self, _: RunningWorker) -> None:
        self._chance.choice(self._gateways()).stop.set()
        await self._mesh.start_gateway()

    async def _freeze(self, victim: RunningWorker) -> None:
        """Its KV stands still."""
        self._mesh.fabric.freeze(victim.transport_address)
        await asyncio.sleep(self._chance.uniform(0.2, 6))
        self._mesh.fabric.thaw(victim.transport_address)

    async def _cut_off(self, victim: RunningWorker) -> None:
        """From a gateway, or from another worker."""
        others = [it for it in (*self._mesh.gateways, *self._mesh.workers) if it is not victim]
        self._mesh.network.fabric.partition(victim.host, self._chance.choice(others).host)
        await asyncio.sleep(self._chance.uniform(0.3, 5))
        self._mesh.network.fabric.heal()

    async def _hold_back(self, victim: RunningWorker) -> None:
        """One direction between it and a gateway."""
        between = [victim.host, self._chance.choice(self._mesh.gateways).host]
        self._chance.shuffle(between)
        self._mesh.network.fabric.hold(*between)
        await asyncio.sleep(self._chance.uniform(0.3, 5))
        self._mesh.network.fabric.release(*between)

    async def _break_streams(self, victim: RunningWorker) -> None:
        """Streams end, and the processes at both ends live on."""
        chance, lost = self._chance, WorkerLost("for a test")
        for gateway in self._gateways():
            if chance.random() < 0.6:
                for session in [it for it in gateway.members.sessions.values() if it.num_legs][:2]:
                    session._control.close(lost)
            if chance.random() < 0.3:
                victim.worker._life.rejoin(gateway.gateway.incarnation)
        if chance.random() < 0.5:
            for link in list(victim.worker.pairs._links.values()):
                link.lose(lost)

    async def _slow_down(self, _: RunningWorker) -> None:
        """All KV, or have it travel as fast as before."""
        chance = self._chance
        self._set_link(chance.choice([FAST, 2e4, 2e5, 1e6]), chance.choice([0.0005, 0.01]))

    async def _move_about(self) -> None:
        """Change homes all the time; some moves are refused, as those of the last of a role."""
        chance = self._chance
        for _ in range(80):
            await asyncio.sleep(0.07)
            victim, gateway = chance.choice(self._mesh.workers), chance.choice(self._gateways())
            home = chance.choice(["prompt", "token"])
            with contextlib.suppress(MeshError):
                await gateway.mesh.change_role(f"{victim.incarnation:016x}", home)

    def _set_link(self, bytes_per_s: float, latency_s: float) -> None:
        self._mesh.fabric.settings = replace(
            self._mesh.fabric.settings,
            bytes_per_s=bytes_per_s,
            latency_s=latency_s,
            num_slices=self._chance.choice([1, 3]),
        )


def _a_worker(chance: random.Random, files: Path) -> dict[str, Any]:
    """Draw settings: what bounds it is often so small that it is met."""
    block_size = chance.choice([4, 8, 16, 32])
    settings: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": int(MAX_TOKENS / block_size * chance.choice([1.0, 1.1, 1.5, 3, 8])) + 2,
        "share_prefixes": chance.random() < 0.8,
        "cache_prefixes": chance.random() < 0.8,
        "look_ahead": chance.random() < 0.7,
        "max_requests": chance.choice([1024, 1024, 6]),
        "max_jobs": chance.choice([1024, 1024, 4]),
        "max_running": chance.choice([256, 256, 3]),
        "batch_tokens": chance.choice([0, 0, 32, 100]),
        "token_budget": chance.choice([0, 0, 64, 300]),
        "transfer_mode": chance.choice(["auto", "layerwise", "serialized"]),
        "group_kib": chance.choice([1, 4, 1024]),
        "tbt_target_s": chance.choice([0.05, 0.05, 0.011]),
        "warm_pairs": chance.choice([32, 32, 1]),
        "drain_s": chance.choice([30.0, 30.0, 1.0]),
    }
    if settings["cache_prefixes"] and chance.random() < 0.4:
        settings["dram_cache"] = chance.choice([1 << 15, 1 << 18])
        settings["cache_policy"] = chance.choice(["lru", "lfu", "length-aware"])
        if chance.random() < 0.6:
            files.mkdir()
            settings |= {"ssd_cache": files, "ssd_cache_size": chance.choice([1 << 16, 1 << 19])}
    return settings


def _a_gateway(chance: random.Random) -> dict[str, Any]:
    return {
        "policy": chance.choice(get_args(RoutingPolicyName)),
        "overload": chance.choice(["off", *get_args(OverloadName)]),
        "max_running": chance.choice([1024, 1024, 5]),
        "max_pending_tokens": chance.choice([8192, 8192, 60, 0]),
        "max_waiting": chance.choice([256, 256, 4]),
        "max_wait_s": chance.choice([2.0, 10.0]),
        "max_attempts": chance.choice([3, 5, 2]),
        "failover_wait_s": chance.choice([3.5, 1.0, 10.0]),
        "drain_s": chance.choice([30.0, 0.5]),
    }


def _sampling(chance: random.Random) -> dict[str, Any]:
    """Draw what a client asks for, in numbers that are the same as float32."""
    max_tokens = chance.randrange(1, 30)
    params: dict[str, Any] = {"max_tokens": max_tokens, "seed": chance.randrange(1 << 30)}
    if chance.random() < 0.5:
        params["temperature"] = chance.choice([0.5, 1.0, 1.5])
    rare: dict[str, Any] = {
        "top_k": chance.choice([1, 5, 40]),
        "top_p": 0.5,
        "repetition_penalty": 1.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logprobs": chance.randrange(4),
        "prompt_logprobs": chance.randrange(3),
        "min_tokens": chance.randrange(max_tokens + 1),
        "ignore_eos": True,
        "stop_token_ids": tuple(chance.sample(range(1, 1024), 60)),
        "allowed_token_ids": pack_u32(sorted(chance.sample(range(1, 1024), 50))),
    }
    return params | {name: value for name, value in rare.items() if chance.random() < 0.12}
