"""One worker, whatever its role: engine, pool, scheduler, step loop, leases, and KV out and in.

    gateways ── Worker.Session ── Door ── Requests ── Life, Leases
        └────── Registry.Join ── WorkerLife  │   └── Stepper ── Scheduler ── BlockPool
    other workers ── dial ── Pusher ─────────┤
                 ── accept ── KvReceiver ────┘

Prefill and decode are two launch profiles of it: ``services/prefill/role.py`` and
``services/decode/role.py``.
"""
