"""Running a model: rows and buffers in, tokens and KV out. torch lives here and nowhere else.

``base.py`` is the contract and ``load.py`` chooses who keeps it: ``torch_engine.py``, ``vllm/`` or
``fake.py``; ``worker.py`` runs it beside an event loop. ``torch_engine.py`` puts rooms together:
``models/`` (what is computed), ``attention/`` and ``native/`` (by which kernels), ``memory/``
(where KV lies), ``sampling/`` (which token comes out) and ``gpu/`` (what a device needs besides).
"""
