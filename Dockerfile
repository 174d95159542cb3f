# Three targets from one file: gateway (neither torch nor UCX in it), prefill, decode.
#
#   docker build --target gateway -t pdmesh-gateway .
#
# Offline: put wheels of all dependencies into a folder `wheels/` beside this file; then no index is asked.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN python3 -m venv /opt/pdmesh && useradd --uid 10001 --no-create-home pdmesh
ENV PATH=/opt/pdmesh/bin:$PATH

FROM base AS source
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# LICENSE is there so that the pattern matches something where there are no wheels.
COPY LICENSE wheels* /wheels/
RUN if ls /wheels/*.whl >/dev/null 2>&1; then \
      printf '[global]\nno-index = true\nfind-links = /wheels\n' > /etc/pip.conf; fi
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY shared shared

FROM source AS gateway-build
RUN pip install .

FROM source AS worker-build
# The torch build is yours to choose, e.g. by an index of its own in PIP_INDEX_URL, or by a wheel.
ARG TORCH=torch==2.13.0
ARG EXTRA=worker
RUN pip install "${TORCH}" && pip install ".[${EXTRA}]"

FROM base AS gateway
COPY --from=gateway-build /opt/pdmesh /opt/pdmesh
USER 10001
ENV PDMESH_HOST=0.0.0.0 PDMESH_LOG_FORMAT=json
EXPOSE 8000 8001
ENTRYPOINT ["pdmesh", "gateway"]

FROM base AS prefill
COPY --from=worker-build /opt/pdmesh /opt/pdmesh
USER 10001
ENV PDMESH_HOST=0.0.0.0 PDMESH_LOG_FORMAT=json PDMESH_METRICS_PORT=9090
ENTRYPOINT ["pdmesh", "prefill"]

FROM prefill AS decode
ENTRYPOINT ["pdmesh", "decode"]
