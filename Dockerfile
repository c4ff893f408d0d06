# syntax=docker/dockerfile:1
# The builder installs the locked dependencies and the project into one virtual environment;
# the final layer has that environment and nothing that builds.

FROM python:3.13-slim AS builder
WORKDIR /src
RUN python -m venv /opt/taskbroker
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN /opt/taskbroker/bin/pip install --require-hashes -r requirements/runtime.txt \
 && python -m pip install --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY migrations migrations
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/taskbroker/bin/pip install --no-deps /wheels/*.whl \
 && /opt/taskbroker/bin/pip uninstall --yes pip

FROM python:3.13-slim
LABEL org.opencontainers.image.title="Task Broker" \
      org.opencontainers.image.description="A durable home for MCP tasks" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin taskbroker \
 && install --directory --owner taskbroker --mode 0700 /var/lib/taskbroker/data
COPY --from=builder /opt/taskbroker /opt/taskbroker
ENV PATH=/opt/taskbroker/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TASKBROKER_HOST=0.0.0.0 \
    TASKBROKER_PORT=8080 \
    TASKBROKER_DATA_DIR=/var/lib/taskbroker/data
USER taskbroker
WORKDIR /tmp
# Only without TASKBROKER_DATABASE_URL: the embedded Postgres, for trying it out.
VOLUME /var/lib/taskbroker/data
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["python", "-c", \
    "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['TASKBROKER_PORT']}/healthz\", timeout=2)"]
ENTRYPOINT ["taskbroker"]
CMD ["serve"]
