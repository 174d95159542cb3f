"""A fused step for x86-64 CPUs, in bfloat16 and float32: C++ (``kernels.cpp``), how it is built
(``build``), called (``library``), and used as a forward pass (``forward``)."""
