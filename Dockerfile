# An image of pd. For CPUs, and for NVIDIA GPUs with CUDA 13:
#   docker build -t pd-serve:0.2.0 .
#   docker build -t pd-serve:0.2.0-cuda --build-arg DEVICE=cuda .
# Its command is pd-launch:
#   docker run --rm pd-serve:0.2.0 prefill --help
ARG DEVICE=cpu

FROM python:3.12-slim AS base-cpu
ENV PD_EXTRAS=fast,hf
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir "torch>=2.11,<2.14" \
        --index-url https://download.pytorch.org/whl/cpu

# FlashInfer compiles kernels with nvcc when a node starts, Triton with a C compiler.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base-cuda
ENV PD_EXTRAS=fast,hf,gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir "torch>=2.11,<2.14" \
        --index-url https://download.pytorch.org/whl/cu130

FROM base-${DEVICE}
COPY pyproject.toml README.md LICENSE /src/
COPY pd /src/pd
RUN /opt/venv/bin/pip install --no-cache-dir "/src[${PD_EXTRAS}]" \
    && rm -rf /src \
    && mkdir /opt/pd \
    && ln -s "$(cd / && /opt/venv/bin/python -c \
        'from pd.embedded import EMBEDDED_MODEL; print(EMBEDDED_MODEL)')" /opt/pd/embedded
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp USER=pd PYTHONUNBUFFERED=1
# The user of the chart in deploy/helm/pd.
USER 10001:10001
ENTRYPOINT ["pd-launch"]
