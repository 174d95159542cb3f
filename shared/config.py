"""What can be set, with units in the names and a sentence each: the command line, the environment
and the configuration file are made from this.

Every field is a flag (``--max-running``), an environment variable (``PDMESH_MAX_RUNNING``) and a
key of the configuration file (``max_running``); ``settings.py`` reads the latter two. There is no
other way to configure a service. The unit of a quantity ends its name (``quantity.py``). What a
field may be stands beside it, rules between fields in ``check``; both come before anything starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, get_args

from shared.address import Address, is_loopback, parse_address
from shared.bounds import (
    MOST_PLANNED,
    ORIGIN,
    AboveZero,
    Between,
    Host,
    OneOf,
    OverloadName,
    PlannerName,
    Reread,
    RoutingPolicyName,
    ThoughtName,
    ToolFamily,
    rules_of,
)
from shared.errors import InvalidRequest
from shared.lanes import read_requirement

MESH_PORT = 8200
"""Where workers join, unless something else is said; room above it for several gateways."""

STEP_TOKENS = 2048
"""Most tokens of a step where nothing else is said."""

SECRET_SETTINGS = frozenset({"api_key"})
"""Never shown, not even to who asks what is configured."""

MESH_TLS_SETTINGS = ("mesh_tls_cert", "mesh_tls_key", "mesh_tls_ca")
"""All of them or none."""

DEMO_MODEL = "demo"
"""Name that ``--model`` takes for the bundled model."""


def _require(condition: bool, param: str, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"--{param.replace('_', '-')} {rule}", param=param)


PORT: Final = Between(0, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What all three services share."""

    model: str = DEMO_MODEL
    """Model: a Hugging Face folder, a hub name, or 'demo' for the bundled one."""

    host: Annotated[str, Host()] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for other machines (read docs/security.md first)."""

    log_level: Annotated[str, OneOf("debug", "info", "warning", "error")] = "info"
    """debug, info, warning or error."""

    log_format: Annotated[str, OneOf("auto", "json", "pretty")] = "auto"
    """json, pretty, or auto: pretty on a terminal."""

    drain_s: Annotated[float, Between(0, 3600)] = 30.0
    """Seconds to finish what is in hand after SIGTERM or Ctrl-C."""

    mesh_secret_file: Annotated[Path | None, Reread()] = None
    """File with the mesh's secret (pdmesh secret), the same for the gateway and all workers; or the
    variable PDMESH_MESH_SECRET. Needed where the mesh leaves this machine, or with API keys."""

    mesh_tls_cert: Annotated[Path | None, Reread()] = None
    """Encrypt what services say to each other, with certificates at both ends: PEM file of this
    service's, and those that lead to its authority. All services of a mesh or none; a renewed file
    counts from the next connection on."""

    mesh_tls_key: Annotated[Path | None, Reread()] = None
    """PEM file with that certificate's private key."""

    mesh_tls_ca: Annotated[Path | None, Reread()] = None
    """PEM file of the authorities that sign the certificates of the mesh's services alone."""

    allow_mixed_engines: bool = False
    """Let workers whose engines differ serve together (torch and vllm, or two releases of vllm):
    they round differently, so that only float32 answers do not depend on who computes them. For the
    gateway and all workers."""

    realtime: bool = False
    """Real-time priority for the event loop and the threads that carry KV: they run when they wake,
    not when a busy core has time for them. Linux; as root, or with an rtprio limit of 2."""

    def check(self) -> None:
        """Raise InvalidRequest, naming the flag, for the first value out of range."""
        for name, rule in rules_of(type(self)).items():
            why = rule.why_wrong(getattr(self, name))
            _require(not why, name, why)
        missing = [name for name in MESH_TLS_SETTINGS if getattr(self, name) is None]
        if 0 < len(missing) < len(MESH_TLS_SETTINGS):
            rule = "is missing: --mesh-tls-cert, --mesh-tls-key and --mesh-tls-ca go together"
            _require(False, missing[0], rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """The gateway: clients on one side, workers on the other. It needs the model's tokenizer, not
    its weights."""

    http_port: Annotated[int, PORT] = 8000
    """Port of the OpenAI-compatible API; 0 = any free one."""

    grpc_port: Annotated[int, PORT] = 8001
    """Port of the gRPC API; 0 = any free one."""

    mesh_host: Annotated[str, Host()] = "127.0.0.1"
    """Address on which workers join: a door of its own, not the clients'."""

    mesh_port: Annotated[int, PORT] = MESH_PORT
    """Port on which workers join; 0 = any free one."""

    gateway_processes: Annotated[int, Between(1, 64)] = 1
    """Gateway processes that share the HTTP port; workers join each, from --mesh-port up."""

    share_http_port: bool = False
    """Let other gateway processes of this host listen on the HTTP port, too."""

    process_port: Annotated[int, PORT] = 0
    """Second HTTP port, of this process alone, for its own /metrics and /cluster if several share
    the first; of several the first one's, the others' follow; 0 = none."""

    model_name: str = ""
    """Name that clients use; default: the folder's name."""

    policy: Annotated[str, OneOf(*get_args(RoutingPolicyName), own="package.module:Class")] = (
        "conductor"
    )
    """Routing policy: conductor (the least predicted time to token 1, by who has or gets the
    prompt's beginning), local (likewise, nothing sent), least_loaded, round_robin, random,
    splitwise, p2c (the better of two random ones), hash (like beginnings together), or
    package.module:Class, your own (docs/add-a-routing-policy.md)."""

    index_memory_mib: Annotated[int, Between(1, 1 << 16)] = 256
    """With conductor or local: most memory for the index of who has which prefix; 24 bytes for each
    128 tokens that a worker has. Workers for which there is no room are taken by their queues."""

    tls_cert: Annotated[Path | None, Reread()] = None
    """Serve clients over TLS, on HTTP and gRPC alike: PEM file with the certificate and those that
    lead to its authority. A renewed file counts from the next connection on."""

    tls_key: Annotated[Path | None, Reread()] = None
    """PEM file with the certificate's private key."""

    tls_client_ca: Annotated[Path | None, Reread()] = None
    """Let in only clients that show a certificate of these authorities (mTLS); a PEM file."""

    api_key: str = ""
    """One API key that clients must send; better in PDMESH_API_KEY: others see command lines."""

    api_keys: Annotated[Path | None, Reread()] = None
    """File of API keys, one 'name:sha256-hex' a line (see pdmesh hash-key); a changed file counts
    from the next call on. Without it and --api-key every client is let in."""

    key_requests_per_minute: Annotated[int, Between(0, 10**9)] = 0
    """Requests a minute of each API key whose line says nothing else; 0 = no limit."""

    key_concurrent_requests: Annotated[int, Between(0, 10**9)] = 0
    """Requests in progress of each API key whose line says nothing else; 0 = no limit."""

    metrics_address: str = ""
    """host:port of a second listener for /metrics, /health and /ready, without API key and TLS, on
    a private network. Of several processes the first one's, the others' follow; port 0 = any."""

    max_running: Annotated[int, Between(1)] = 1024
    """Requests in progress at once; more wait."""

    max_pending_tokens: Annotated[int, Between(0)] = 8192
    """Prompt tokens, or four prompts if they are more, that each prefill worker has ahead, of all
    gateways; others wait in the gateway, where priority and fairness decide. 0 = none do."""

    max_waiting: Annotated[int, Between(0)] = 256
    """Requests that may wait for a place; more are refused at once."""

    max_wait_s: Annotated[float, AboveZero(60)] = 2.0
    """Longest wait for a place, and for a worker pair; with --max-pending-tokens 0 for blocks on
    decode, too, there beyond what the prompt is predicted to take."""

    overload: Annotated[str, OneOf(*get_args(OverloadName))] = "off"
    """When a request is refused that would miss its own limits (ttft_ms, tpot_ms): off; stage: when
    the stage that would miss it is reached; early: at arrival, by the load as it is; predicted: at
    arrival, by the load as it will be."""

    planner: Annotated[str, OneOf(*get_args(PlannerName))] = "off"
    """Watch the load, and keep the limits below with few workers: off; advise: say in log, /cluster
    and metrics what is wanted; act: also refuse early, borrow, move homes. pdmesh up starts and
    ends workers, too; elsewhere an autoscaler reads the metrics (docs/planner.md)."""

    planner_ttft_s: Annotated[float, AboveZero(3600)] = 2.0
    """With --planner: limit of the time to first token."""

    planner_tpot_s: Annotated[float, AboveZero(60)] = 0.1
    """With --planner: limit of the mean time of each token after the first."""

    planner_target: Annotated[float, AboveZero(0.999)] = 0.95
    """With --planner: share of requests that keep both limits."""

    planner_dwell_s: Annotated[float, Between(10, 86400)] = 600.0
    """With --planner: least time from a rise of the number of workers to a fall."""

    max_workers: Annotated[int, Between(0, MOST_PLANNED)] = 0
    """With --planner: most workers, of all roles together; 0 = as many as it takes."""

    tenants: Path | None = None
    """TOML file with a table [tenants.NAME] for each API key that has terms of its own: weight,
    ttft_ms, tpot_ms, max_priority, max_running. They may stand in the configuration file, too."""

    max_choices: Annotated[int, Between(1, 1024)] = 8
    """Most answers to one prompt (n)."""

    cors_origins: str = ""
    """Origins whose pages may ask from a browser, as https://example.org or app://obsidian.md,
    separated by commas, or * for any; empty: only the gateway's own page."""

    trust_templates: bool = False
    """Let requests bring their own chat template: a sandboxed program, in a process that is ended
    after 0.5 s of processor time or with 2 GiB of memory."""

    chat_template: Path | None = None
    """Jinja file with the model's chat template, in place of the one in its folder."""

    tool_parser: Annotated[str, OneOf("auto", "none", *get_args(ToolFamily))] = "auto"
    """How the model writes calls of tools; auto: as its chat template shows."""

    reasoning_parser: Annotated[str, OneOf("auto", "none", *get_args(ThoughtName))] = "auto"
    """Tell thinking (think: <think> to </think>) apart as reasoning_content; auto: likewise."""

    max_attempts: Annotated[int, Between(1, 5)] = 3
    """Dispatches of one request in all, the first included."""

    failover_wait_s: Annotated[float, AboveZero(60)] = 3.5
    """Longest silence of a request whose worker was lost, until another takes it or it fails."""

    request_timeout_s: Annotated[float, Between(0, 10**9)] = 600.0
    """Deadline of requests that bring none; 0 = none."""

    @property
    def why_secret(self) -> str:
        """Why the mesh needs a secret; '' = it needs none."""
        if not is_loopback(self.mesh_host):
            return f"--mesh-host {self.mesh_host} can be reached from other machines"
        return "clients need API keys" if self.has_keys else ""

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_key) or self.api_keys is not None

    @property
    def origins(self) -> frozenset[str]:
        """``cors_origins``, one by one."""
        return frozenset(name.strip() for name in self.cors_origins.split(",") if name.strip())

    def check(self) -> None:
        super(GatewayConfig, self).check()  # slots=True makes the class anew, unknown to super()
        for name in ("grpc_port", "mesh_port", "process_port"):
            last = getattr(self, name) + self.gateway_processes - 1
            _require(last < 65536, name, "leaves too few ports above it for all processes")
        is_planned = self.planner != "off" or not self.max_workers
        _require(is_planned, "max_workers", "is the most that --planner act may want: give that")
        has_key = self.tls_key is not None
        _require((self.tls_cert is not None) == has_key, "tls_cert", "goes together with --tls-key")
        _require(has_key or self.tls_client_ca is None, "tls_client_ca", "needs --tls-cert, too")
        is_key = re.fullmatch(r"[!-~]{1,512}", self.api_key) is not None
        _require(not self.api_key or is_key, "api_key", "must be 1..512 visible ASCII characters")
        for name in ("key_requests_per_minute", "key_concurrent_requests"):
            rule = "limits API keys: give --api-keys or --api-key"
            _require(self.has_keys or not getattr(self, name), name, rule)
        if self.metrics_address:
            parse_address(self.metrics_address, param="metrics_address")
        are_origins = all(ORIGIN.fullmatch(name) for name in self.origins)
        _require(are_origins, "cors_origins", "must be origins as https://example.org, or *")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """What prefill and decode share."""

    gateway: str = f"127.0.0.1:{MESH_PORT}"
    """host:port of the gateway's door for workers (its --mesh-host and --mesh-port); a name with
    several addresses means several gateways; commas separate more."""

    port: Annotated[int, PORT] = 0
    """gRPC port of this worker; 0 = any free one."""

    advertise: str = ""
    """host or host:port at which others reach this worker; default: what the gateway sees."""

    metrics_port: Annotated[int, PORT] = 0
    """Port for /metrics and /health of this worker; 0 = none."""

    require_lane: str = ""
    """Refuse partners to which KV moves otherwise: shm (shared memory), cuda_ipc, rdma, tcp, or a
    transport of UCX; commas separate several; '' = any."""

    allow_unencrypted_kv: bool = False
    """Pair with workers on other hosts: KV crosses the network in the clear (UCX does not encrypt),
    which is right on a private fabric alone."""

    engine: Annotated[str, OneOf("torch", "vllm", "fake", own="package.module:load")] = "torch"
    """torch: our own, for four families; vllm: all that vLLM computes by attention (docs/vllm.md);
    fake: exact, without weights, for tests and for trying things out; or package.module:load."""

    vllm_args: str = ""
    """vLLM's own arguments, for what is no setting here: key=value with spaces between them, as
    'quantization=fp8 tensor_parallel_size=2', or a file of such lines or of one JSON object."""

    device: str = "auto"
    """cpu, cuda (the first that torch sees), cuda:N, or auto: cuda where torch sees one."""

    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    """float32, bfloat16, float16, or auto: as the checkpoint says, but float32 instead of 16 bits
    on a CPU without native kernels, and with --engine vllm 16 bits instead of float32."""

    threads: Annotated[int, Between(0, 1024)] = 0
    """CPU threads of the engine; 0 = as many as cores, shared among the local workers."""

    kernels: Annotated[
        str, OneOf("auto", "native", "amx", "avx512-bf16", "avx512", "avx2", "triton", "torch")
    ] = "auto"
    """native (a CPU's quickest instructions, or those that are named: all give the same bits but
    amx; docs/operations.md), triton (CUDA), torch, or auto: native or triton where they run."""

    exact: bool = False
    """No answer depends on what it is computed with, or the worker does not start: on a GPU by
    products and attention of fixed shapes and a digest of every frame of KV, which is slower; on a
    CPU that is the rule already. For all workers of a mesh."""

    kv_gib: Annotated[float, Between(0, 1 << 20)] = 0.0
    """Memory for KV in GiB, taken at start; 0 = 1 GiB on CPU, what --gpu-memory-share leaves on a
    GPU."""

    gpu_memory_share: Annotated[float, AboveZero(1)] = 0.9
    """Part of its GPU's memory that this worker may take in all. KV gets what weights, the largest
    step (measured at start) and staging leave of it; workers that share a GPU need a part each."""

    num_blocks: Annotated[int, Between(0, 1 << 24)] = 0
    """KV blocks; overrides --kv-gib; 0 = from memory."""

    block_size: Annotated[int, Between(0, 4096)] = 0
    """Tokens a KV block; may differ between prefill and decode. 0 = 16; with --engine vllm on a CPU
    32."""

    staging_mib: Annotated[int, Between(16, 32768)] = 64
    """Memory for frames on their way, in MiB."""

    share_prefixes: bool = True
    """Take KV of prompts' beginnings from other workers' caches, and give it, where a gateway
    predicts that to be quicker than computing it again (--policy conductor)."""

    warm_pairs: Annotated[int, Between(1, 1024)] = 32
    """Pairs with others than standing partners that stay ready after their first use; beyond that
    the one used longest ago is closed."""

    max_model_len: Annotated[int, Between(0, 1 << 28)] = 0
    """Longest prompt plus answer in tokens; 0 = what the model was made for."""

    token_budget: Annotated[int, Between(0, 1 << 24)] = 0
    """Most tokens a step computes; longer prompts are computed in chunks. 0 = 2048; on a colocated
    worker as many as fit into --tbt-target-s, and at most 2048."""

    max_running: Annotated[int, Between(1, 1 << 16)] = 256
    """Most sequences in a step."""

    cache_prefixes: bool = True
    """Keep KV of finished prompts for later ones with the same beginning."""

    dram_cache: Annotated[int, Between(0, 1 << 50)] = 0
    """Host memory below the KV pool, as 4GB: blocks that nobody uses are copied there, and come
    back where that is predicted to be quicker than computing them again. 0 = none; so has a worker
    that computes no prompts."""

    ssd_cache: Path | None = None
    """Folder on a local disk for blocks that nobody uses, below the pool and --dram-cache; a worker
    that starts on it anew finds them again. Workers of one host may share it: each takes a part of
    its own."""

    ssd_cache_size: Annotated[int, Between(1, 1 << 50)] = 10_000_000_000
    """Room that each worker takes there at start, as 40GB."""

    cache_policy: Annotated[str, OneOf("lru", "lfu", "length-aware")] = "lru"
    """What gives way in --dram-cache and --ssd-cache: used longest ago, least often, or least often
    and then the longest prefix."""

    fake_step_s: Annotated[float, Between(0, 60)] = 0.0
    """Fake engine only: seconds that a step takes."""

    movable: bool = False
    """Do the other role's work, too, whenever the mesh needs it, and change the role for good when
    told (pdmesh role)."""

    # What follows is for prompts whose KV goes elsewhere.

    max_jobs: Annotated[int, Between(1)] = 1024
    """Prompts in hand at once; more are refused."""

    batch_tokens: Annotated[int, Between(0, 1 << 24)] = 0
    """Prompts share a step up to so many tokens in all; what is longer is computed alone, before
    the next. 0 = what keeps the device busy, as measured at the first start (pdmesh profile)."""

    profile_file: Path | None = None
    """File.json of what was measured of this machine, or a folder that gets one for each device and
    model; default: a folder in the user's cache."""

    transfer_mode: Annotated[str, OneOf("auto", "layerwise", "serialized")] = "auto"
    """layerwise: KV moves while later layers compute; serialized: after them; auto: whichever
    exposes less."""

    group_kib: Annotated[int, Between(1, 8192)] = 1024
    """Layers are grouped until a frame is this large, in KiB."""

    # What follows is for answers.

    max_requests: Annotated[int, Between(1)] = 1024
    """Answers in hand at once, waiting ones included; more are refused."""

    tbt_target_s: Annotated[float, Between(0, 60)] = 0.0
    """Colocated or movable only: how long a step may take while answers run, and so the time
    between tokens; prompts get what those leave of it. 0 = 0.05, or twice what the answers alone
    take where that is longer. An explicit --token-budget is obeyed instead."""

    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs at start and replay them; with triton kernels alone."""

    max_graph_rows: Annotated[int, Between(1, 4096)] = 256
    """Largest batch that is recorded; larger ones run kernel by kernel."""

    look_ahead: bool = True
    """Plan a step while the one before it runs, so that the device need not wait for it."""

    @property
    def needs_profile(self) -> bool:
        """Whether anything is left to what is measured of the machine."""
        return not self.batch_tokens or self.transfer_mode == "auto"

    @property
    def max_step_tokens(self) -> int:
        """Most tokens a step computes."""
        return self.token_budget or STEP_TOKENS

    @property
    def gateways(self) -> tuple[Address, ...]:
        """The gateways' names. Raises InvalidRequest."""
        names = [name for name in self.gateway.split(",") if name.strip()]
        return tuple(parse_address(name, param="gateway", default_port=MESH_PORT) for name in names)

    @property
    def why_secret(self) -> str:
        """Why the mesh needs a secret; '' = it needs none."""
        if not is_loopback(self.host):
            return f"--host {self.host} can be reached from other machines"
        away = [name.host for name in self.gateways if not is_loopback(name.host)]
        return f"the gateway {away[0]} is another machine" if away else ""

    def check(self) -> None:
        super(WorkerConfig, self).check()
        for name in ("dram_cache", "ssd_cache"):
            has_cache = self.cache_prefixes or not getattr(self, name)
            _require(has_cache, name, "keeps what --cache-prefixes finds: leave that on")
        has_vllm_args = not self.vllm_args or self.engine == "vllm"
        _require(has_vllm_args, "vllm_args", "goes with --engine vllm alone")
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        _require(is_device, "device", "must be auto, cpu, cuda or cuda:N")
        _require(bool(self.gateways), "gateway", "must name a gateway as host:port")
        read_requirement(self.require_lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts and pushes their KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: receives KV, runs the batch, streams tokens."""

    staging_mib: Annotated[int, Between(16, 32768)] = 128
    """Memory for frames that arrive, in MiB."""

    colocated: bool = False
    """Take whole requests as well: prompts are computed here, in chunks between the tokens of
    running answers, and no KV is transferred."""
