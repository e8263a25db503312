# longtrain for a CPU or for NVIDIA GPUs:
#   docker build --target cpu  -t longtrain:cpu  .
#   docker build --target cuda -t longtrain:cuda .
#   docker run --rm --gpus all -v "$PWD:/work" longtrain:cuda +recipe=quickstart
# Outputs are written below /work, the container's home of runs and checkpoints.
FROM python:3.12-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# Triton compiles the launchers of its kernels with the system's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/longtrain

FROM base AS cpu
RUN pip install "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN pip install . && useradd --create-home user && mkdir -p /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["longtrain"]
CMD ["--help"]

# torch's own wheels bring CUDA; the host needs its driver and the NVIDIA container toolkit alone.
FROM base AS cuda
RUN pip install "torch>=2.11,<2.14"
COPY . .
RUN pip install . && useradd --create-home user && mkdir -p /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["longtrain"]
CMD ["--help"]
