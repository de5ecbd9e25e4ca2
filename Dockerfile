# nanogrpo on CPUs.
#
#   docker build --tag nanogrpo .
#   docker run --rm -it -v "$PWD:/work" nanogrpo demo
#   docker run --rm -it -v "$PWD:/work" nanogrpo train --model MODEL --data train.jsonl …
#
# The PyTorch of PyPI includes CUDA and takes several GB. For a small image, give the index of
# PyTorch's CPU builds: docker build --build-arg TORCH_INDEX=URL --tag nanogrpo .
FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=""
WORKDIR /src
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY . .
RUN python -m pip install --no-cache-dir --constraint constraints.txt ".[data,plot,tools]"
WORKDIR /work
ENTRYPOINT ["nanogrpo"]
CMD ["--help"]
