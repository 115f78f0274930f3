# CPU:            docker build -t kbf .
# CUDA:           docker build -t kbf --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# DeepMind Lab:   docker build -t kbf --build-context lab=DIR --build-arg PYTHON=3.13 .
#                 DIR holds a deepmind_lab wheel; PYTHON is the version that it was compiled for: 3.11 for a wheel that Bazel
#                 built (it imports imp and pkg_resources), 3.13 for one of dmlab-gym
# Tests:          docker build --target test .
#
# docker run --rm --user "$(id -u)" -v "$PWD/runs:/kbf/runs" kbf train data=rotation n_train=300
# docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/runs:/kbf/runs" kbf serve checkpoint=runs/arm/checkpoints/best.ckpt host=0.0.0.0
# docker run --rm --gpus all --user "$(id -u)" -v "$PWD/runs:/kbf/runs" kbf train trainer=gpu

ARG PYTHON=3.12

FROM scratch AS lab

FROM python:${PYTHON}-slim-bookworm AS base
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /kbf

# DeepMind Lab renders through OSMesa, opens SDL, and packs the levels of DMLab-30 with zip
RUN apt-get update && apt-get install -y --no-install-recommends libosmesa6 libsdl2-2.0-0 zip && rm -rf /var/lib/apt/lists/*

# torch and torchvision from one index: builds of different kinds do not work together
RUN pip install torch torchvision --index-url "$TORCH_INDEX"
RUN --mount=type=bind,from=lab,target=/lab \
    if ls /lab/*.whl > /dev/null 2>&1; then pip install dm-env "setuptools<81" /lab/*.whl && python -c "import deepmind_lab"; else echo "no DeepMind Lab wheel was handed in"; fi

COPY . .
RUN pip install -e ".[sweep,serve]"

FROM base AS test
# the tests look at processes with ps
RUN apt-get update && apt-get install -y --no-install-recommends procps && rm -rf /var/lib/apt/lists/*
RUN pip install -e ".[dev,sweep]"
RUN python -m pytest -n 2

FROM base
RUN useradd --create-home kbf && mkdir -p runs && chmod 777 runs
USER kbf
ENV KBF_CACHE=/tmp/kbf MPLCONFIGDIR=/tmp/matplotlib
ENTRYPOINT ["kbf"]
CMD ["--help"]
