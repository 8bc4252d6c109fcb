# cairn-coordinator: serves a run, and trains on CPUs; torch without CUDA. From the repository's root:
#     docker build -t cairn-coordinator -f docker/coordinator.Dockerfile .
ARG PYTHON=python:3.11-slim-bookworm

FROM $PYTHON AS wheel
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM $PYTHON
# All that is kept is in /data, with owner.key in it: keep a copy.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /data --create-home --shell /usr/sbin/nologin cairn
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "$(echo /wheels/*.whl)[postgres,parquet,qlora]"
ENV CAIRN_HOME=/data CAIRN_IMAGE=cairn-coordinator
USER 10001
WORKDIR /data
VOLUME /data
# Peers; the page; the swarm.
EXPOSE 7410 7411 7412 7412/udp
# A start reads the whole chain first: of 300 peers, 20,000 rounds take a quarter of an hour on a slow core.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60m --retries=4 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:7411/api', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "cairn"]
CMD ["coordinator", "serve", "--help"]
