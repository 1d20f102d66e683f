# The image of the gateway and the controller. It has no torch and is smaller than 300 MB.
FROM python:3.12.14-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e AS build
RUN python -m venv --without-pip /opt/venv
WORKDIR /src
COPY docker/requirements docker/requirements
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --disable-pip-version-check install --require-hashes --only-binary :all: -r docker/requirements/build.txt \
    && pip --disable-pip-version-check --python /opt/venv/bin/python install --require-hashes --no-deps \
        --only-binary :all: -r docker/requirements/gateway.txt
COPY pyproject.toml README.md ./
COPY services services
COPY shared shared
COPY kernels kernels
RUN pip --disable-pip-version-check wheel --no-deps --no-index --no-build-isolation --wheel-dir /wheels . \
    && pip --disable-pip-version-check --python /opt/venv/bin/python install --no-deps --no-index /wheels/*.whl
# Half of the installed size is unused: the asyncio part of the Kubernetes client with its dependencies, and byte code of
# API objects, few of which are loaded. Models are downloaded by plain HTTP, so hf_xet goes too.
RUN cd /opt/venv/lib/python3.12/site-packages \
    && rm -r kubernetes/aio aiohttp aiohttp_retry aiosignal frozenlist multidict propcache yarl aiohappyeyeballs hf_xet \
    && find kubernetes -name '*.pyc' -delete
RUN mkdir /opt/baton \
    && ln -s "$(/opt/venv/bin/python -c 'import baton_demo; print(baton_demo.MODEL_DIR)')" /opt/baton/demo-model

FROM python:3.12.14-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton gateway" \
      org.opencontainers.image.description="OpenAI-compatible gateway in front of prefill and decode pods" \
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
EXPOSE 8000 9400
ENTRYPOINT ["baton"]
CMD ["gateway"]
