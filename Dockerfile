# fcl-bench in a container. The base image decides between CPU and CUDA:
#   docker build -t fcl-bench .
#   docker build -t fcl-bench:cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 .
#   docker run --rm -v "$PWD/outputs:/runs/outputs" fcl-bench method=stsa data=digits
#   docker run --rm --gpus all -v "$PWD/outputs:/runs/outputs" fcl-bench:cuda device=cuda data=cifar100
# The default index has wheels of PyTorch with CUDA, which also run without a GPU. An index with smaller wheels, for a CPU
# alone, or with wheels for another version of CUDA, is --build-arg TORCH_INDEX=URL.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

# Where the wheels of PyTorch come from; empty: the default index.
ARG TORCH_INDEX=
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# CUDA's images bring no Python; Python's own have one in /usr/local.
# hadolint ignore=DL3008
RUN if ! command -v python3 >/dev/null; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && python3 -m venv /opt/fcl-bench \
    && useradd --create-home --uid 10001 bench \
    && install --directory --owner bench /runs
ENV PATH=/opt/fcl-bench/bin:$PATH

# PyTorch first: this layer stays when the source changes. Its newest version is wanted, so none is pinned.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch>=2.4" "torchvision>=0.19"

COPY pyproject.toml README.md LICENSE /src/
COPY conf /src/conf
COPY results /src/results
COPY src /src/src
RUN pip install --no-cache-dir /src

# Files in /runs/outputs belong to this user; `docker run --user "$(id -u)"` makes them yours.
USER 10001
WORKDIR /runs
ENV HF_HOME=/runs/outputs/cache/hub MPLCONFIGDIR=/runs/outputs/cache/matplotlib
ENTRYPOINT ["fcl-bench"]
CMD ["--help"]
