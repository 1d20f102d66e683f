# Prefill and decode pods without a GPU, with the demo model.
FROM python:3.12.12-slim-bookworm AS build
RUN python -m venv --without-pip /opt/venv
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY services services
COPY shared shared
COPY kernels kernels
# From elsewhere than the rest: the torch of PyPI brings gigabytes of CUDA along.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --disable-pip-version-check --python /opt/venv/bin/python install -c constraints.txt \
        --index-url "${TORCH_INDEX}" torch
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --disable-pip-version-check --python /opt/venv/bin/python install -c constraints.txt '.[worker]'
RUN mkdir /opt/baton \
    && ln -s "$(/opt/venv/bin/python -c 'import baton_demo; print(baton_demo.MODEL_DIR)')" /opt/baton/demo-model

FROM python:3.12.12-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton worker, CPU" \
      org.opencontainers.image.description="Prefill or decode pod without a GPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton
COPY --from=build /opt /opt
# The root may be read-only: all that is written goes below /tmp.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 10001:10001
EXPOSE 50051 50052 9400
ENTRYPOINT ["baton"]
CMD ["decode", "--help"]
