# The image of prefill and decode pods without a GPU. It contains the demo model.
FROM python:3.12.14-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e AS build
RUN python -m venv --without-pip /opt/venv
WORKDIR /src
COPY docker/requirements docker/requirements
# torch comes from its own index, because PyPI's build needs gigabytes of CUDA. The lock file has its hash too.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --disable-pip-version-check install --require-hashes --only-binary :all: -r docker/requirements/build.txt \
    && pip --disable-pip-version-check --python /opt/venv/bin/python install --require-hashes --no-deps \
        --only-binary :all: --extra-index-url "${TORCH_INDEX}" -r docker/requirements/worker-cpu.txt
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
LABEL org.opencontainers.image.title="Baton worker, CPU" \
      org.opencontainers.image.description="Prefill or decode pod without a GPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton
COPY --from=build /opt /opt
# The root file system may be read-only, so all writes go below /tmp.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 10001:10001
EXPOSE 50051 50052 9400
ENTRYPOINT ["baton"]
CMD ["decode", "--help"]
