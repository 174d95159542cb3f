"""``pdmesh bench``: an open-loop load generator for OpenAI-compatible servers.

What is sent (``workload.py``, ``sources.py``, ``prompts.py``) is planned before the
first request and depends on nothing that comes back; ``open_loop.py`` sends it on time,
``endpoints.py`` speaks to servers, ``summary.py`` judges with the definitions of
``shared/telemetry/definitions.py``. It knows nothing of how a mesh works inside.

For programs (``bench/`` uses it so):

    async with open_endpoints(["http://127.0.0.1:8000"]) as endpoints:
        workload = plan(SHAPES["chat"], Load(rate=2.0, duration_s=30.0), fit=fit_of(endpoints))
        run = await run_open_loop(endpoints, workload)
    summary = summarize(run, Slo(ttft_s=0.5, tpot_s=0.05))
"""
