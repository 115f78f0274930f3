# CPU:            docker build -t kbf .
# CUDA:           docker build -t kbf --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# DeepMind Lab:   docker build -t kbf --build-context lab=DIR --build-arg PYTHON=3.13 .
#                 DIR holds a deepmind_lab wheel; PYTHON is the version that it was compiled for (kbf needs 3.11 to 3.13)
#
# docker run --rm -v "$PWD/runs:/kbf/runs" kbf train data=rotation n_train=300
# docker run --rm --gpus all -v "$PWD/runs:/kbf/runs" kbf train trainer=gpu

ARG PYTHON=3.12

FROM scratch AS lab

FROM python:${PYTHON}-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /kbf

# the tests look at processes with ps; DeepMind Lab renders through OSMesa
RUN apt-get update && apt-get install -y --no-install-recommends procps libosmesa6 && rm -rf /var/lib/apt/lists/*

# torch and torchvision from one index: builds of different kinds do not work together
RUN pip install torch torchvision --index-url "$TORCH_INDEX"
RUN --mount=type=bind,from=lab,target=/lab \
    if ls /lab/*.whl > /dev/null 2>&1; then pip install /lab/*.whl && python -c "import deepmind_lab"; else echo "no DeepMind Lab wheel was handed in"; fi

COPY . .
RUN pip install -e ".[dev,sweep]"

ENTRYPOINT ["kbf"]
CMD ["--help"]

RUN python -m pytest -n 2
