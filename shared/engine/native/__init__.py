"""A fused bfloat16 step for CPUs with AVX-512 BF16: C++ (``kernels.cpp``), how it is built
(``build``), called (``library``), and used as a forward pass (``forward``)."""
