# Three targets from one file: gateway (neither torch nor UCX), prefill, decode.
#
#   docker build --target gateway -t pdmesh-gateway .
#
# TORCH picks the build of torch; PIP_OPTIONS="--no-index --find-links /path" installs from a wheel folder of the base image.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/pdmesh && useradd --uid 10001 --no-create-home pdmesh
ENV PATH=/opt/pdmesh/bin:$PATH

FROM base AS source
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY shared shared

FROM source AS gateway-build
ARG PIP_OPTIONS=""
RUN pip install ${PIP_OPTIONS} .

FROM source AS worker-build
ARG PIP_OPTIONS=""
ARG TORCH="torch==2.13.0"
ARG EXTRA=worker
RUN pip install ${PIP_OPTIONS} "${TORCH}" && pip install ${PIP_OPTIONS} ".[${EXTRA}]"

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
