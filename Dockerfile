# Gristmill in a container: text, run files and runs are mounted at /work.
#
#   docker build -t gristmill .                                      for CPUs
#   docker build -t gristmill:cuda --build-arg TORCH=cu130 .         for NVIDIA GPUs
#   docker run --rm -v "$PWD:/work" gristmill demo
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" gristmill:cuda train run.toml

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
# cpu, or the version of CUDA as PyTorch's package index calls it, such as cu130.
ARG TORCH=cpu
ARG EXTRAS=data,gpt2,hf,parquet,serve
WORKDIR /source
RUN python -m venv /opt/gristmill
ENV PATH=/opt/gristmill/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Torch has a layer of its own: it is large, and changes seldom.
COPY constraints.txt ./
RUN pip install -r constraints.txt --index-url "https://download.pytorch.org/whl/${TORCH}"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
# torch.compile and Triton compile with the system's C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 gristmill
COPY --from=build /opt/gristmill /opt/gristmill
ENV PATH=/opt/gristmill/bin:$PATH
USER 1000
WORKDIR /work
# The live page and the server listen inside of the container only if told so: --host 0.0.0.0.
EXPOSE 8000 8001
ENTRYPOINT ["gristmill"]
CMD ["--help"]
