"""How this process wants its UCX. Knows only names of UCX's variables, so that any configuration
may import it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from shared.errors import TransferFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxSettings:
    """Defaults measured in bench/transfer; a variable that is already in the environment wins over
    all of them.

    tls: UCX_TLS. All but posix: between containers that share an IPC namespace but no PID namespace
    posix connects and then fails, while sysv works; UCX itself drops what the machine lacks and
    what cannot report a dead peer (cma).
    keepalive_interval_s: how soon the death of a process on the same host is seen.
    tcp_segment_bytes: UCX's own 8 KiB cost a factor of 5; 1 MiB leave the core's cache, and a frame
    of 1 MiB with its header takes two of them.
    spin_s: how long after the last event the pump looks on, yielding its core, before it sleeps.
    max_in_flight: operations at once; one more is refused with LocalProtocolError.

    Our endpoints report dead peers (UCX's error handling), and UCX lets only some protocols do
    that. What this means for device memory, read in the source of 1.21, not tried on a device:

    - cuda_ipc is among them. It was not in 1.14's time (openucx/ucx 8916, mended by 8926 in 1.15).
    - On GPUs without NVLink it only writes (UCX_CUDA_IPC_ENABLE_GET_ZCOPY=auto): tag messages do
      well with that, for the receiver asks the sender to write.
    - Where it cannot be used, pipelines through the host's memory are not either, unless
      UCX_RNDV_PIPELINE_ERROR_HANDLING=y: frames are copied in and out piece by piece, by cuda_copy
      on this thread. That stays UCX's default, as nobody has seen such a pipeline lose its peer.
    - cuda_copy is no lane of rendezvous for them, as it cannot take a write back; openucx/ucx 11319
      (open) would allow it within one process only.
    - 1.21 takes device memory for as long as a context lives when both ends are one process
      (openucx/ucx 11854): pairs are two processes.

    Which of these it was is found out for each pair (``protocol_table.py``).
    """

    tls: str = "^posix"
    keepalive_interval_s: float = 1.0
    tcp_segment_bytes: int = 256 << 10
    spin_s: float = 100e-6
    max_in_flight: int = 65536

    def apply_to(self, environment: MutableMapping[str, str]) -> None:
        """Add what is missing. Some of it works only before ``import ucxx``: UCX reads its own
        variables when it is loaded, those of transports when a worker is made.

        Raises TransferFailed: what is there would end the process.
        """
        wanted = {
            "UCX_TLS": self.tls,
            "UCX_MEMTYPE_CACHE": "n",  # ucxx sets it too, but after UCX has read its environment
            "UCX_LOG_FILE": "stderr",  # the default, stdout, belongs to the program
            "UCX_WARN_UNUSED_ENV_VARS": "n",
            "UCX_DEBUG_SIGNO": "0",  # the default is SIGHUP, which is for us to hear
            # Without it every endpoint that reports dead peers falls from shared memory to tcp,
            # silently.
            "UCX_MM_ERROR_HANDLING": "y",
            "UCX_KEEPALIVE_INTERVAL": f"{round(self.keepalive_interval_s * 1000)}ms",
            # UCX's own default waits in connect() on the thread that moves everybody's KV: two
            # minutes, if a firewall drops what goes there. And 1.21 ends the process if a peer
            # resets such a connection before its first message.
            "UCX_TCP_CONN_NB": "y",
            "UCX_TCP_TX_SEG_SIZE": str(self.tcp_segment_bytes),
            "UCX_TCP_RX_SEG_SIZE": str(self.tcp_segment_bytes),
            "UCX_RNDV_THRESH": "8192",
        }
        for name, value in wanted.items():
            environment.setdefault(name, value)
        if "inf" in (threshold := environment["UCX_RNDV_THRESH"].lower()):
            # UCX 1.21 knows no rendezvous then, and fails (SIGSEGV) when a peer begins one.
            raise TransferFailed(
                f"UCX_RNDV_THRESH={threshold} would end this process with a peer's first large "
                "message; give a size (1g: hardly any message is larger)"
            )
