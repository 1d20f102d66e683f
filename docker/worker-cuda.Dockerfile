# The image of prefill and decode pods with an NVIDIA GPU. torch includes CUDA's libraries; the node has the driver.
FROM python:3.12.14-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e AS build
RUN python -m venv --without-pip /opt/venv
WORKDIR /src
COPY docker/requirements docker/requirements
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --disable-pip-version-check install --require-hashes --only-binary :all: -r docker/requirements/build.txt \
    && pip --disable-pip-version-check --python /opt/venv/bin/python install --require-hashes --no-deps \
        --only-binary :all: -r docker/requirements/worker-cuda.txt
COPY pyproject.toml README.md ./
COPY services services
COPY shared shared
COPY kernels kernels
RUN pip --disable-pip-version-check wheel --no-deps --no-index --no-build-isolation --wheel-dir /wheels . \
    && pip --disable-pip-version-check --python /opt/venv/bin/python install --no-deps --no-index /wheels/*.whl
RUN mkdir /opt/baton \
    && ln -s "$(/opt/venv/bin/python -c 'import baton_demo; print(baton_demo.MODEL_DIR)')" /opt/baton/demo-model

FROM python:3.12.14-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton worker, CUDA" \
      org.opencontainers.image.description="Prefill or decode pod with an NVIDIA GPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles the launchers of its kernels at first use, which needs a C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton
COPY --from=build /opt /opt
# The root file system may be read-only, so all writes, including compiled kernels, go below /tmp.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
USER 10001:10001
EXPOSE 50051 50052 9400
ENTRYPOINT ["baton"]
CMD ["decode", "--help"]
