"""vLLM below our Engine protocol: it computes the step that our scheduler planned, in blocks that
our pool owns (docs/vllm.md).

    release.py    which vLLM, and what must be set before it is imported
    settings.py   our settings and --vllm-args as vLLM's arguments; knows no vLLM
    plugins.py    what vLLM calls: scheduler, layer events, sampler
    whole_weights.py    which files vLLM loads, and that all its weights were in them
    rows.py       our rows as vLLM's SchedulerOutput
    pools.py      KV between vLLM's layouts and the wire's; knows no vLLM
    ranks.py      tensor parallel: the pools and the layer events of other processes
    engine.py     the engine; load.py makes it

vLLM is imported below this folder alone. It keeps much that is global to a process, so there is one
engine of it a process.
"""
