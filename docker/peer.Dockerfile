# cairn-peer: trains on NVIDIA GPUs. From the repository's root:
#     docker build -t cairn-peer -f docker/peer.Dockerfile .
# torch has its own CUDA libraries, of CUDA 13: the host's driver has to be 580 or newer. The base refuses older ones.
ARG CUDA=nvidia/cuda:13.0.3-base-ubuntu24.04

FROM $CUDA AS build
# torch.compile calls a C compiler, with Python's headers, on the machine that trains.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/cairn

FROM build AS wheel
COPY . /src
RUN /opt/cairn/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM build
# All that is kept is in /data: identity, runs, logs, compiled layers.
RUN useradd --system --uid 10001 --home-dir /data --create-home --shell /usr/sbin/nologin cairn
COPY --from=wheel /wheels /wheels
RUN /opt/cairn/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[qlora]"
# By the last, `cairn peer upgrade` says that the image has to be a newer one.
ENV PATH=/opt/cairn/bin:$PATH CAIRN_HOME=/data CAIRN_IMAGE=cairn-peer
USER 10001
WORKDIR /data
VOLUME /data
# A peer needs no open port. Once admitted it writes its status each second. While the day's traffic is used up it is out
# of the swarm, and writes only that traffic. A start reads the whole chain first: of 300 peers, 20,000 rounds take a
# quarter of an hour on a slow core.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60m --retries=4 \
    CMD ["sh", "-c", "find /data '(' -name status.json -o -name traffic.json ')' -mmin -2 | grep -q ."]
# SIGTERM (`docker stop`) leaves in order: announces what is done, saves the remaining work. Allow it 60 s:
# --stop-timeout 60.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "cairn"]
CMD ["peer", "join", "--help"]
