# The image that tasks run in on a cluster. Not built in CI.
#   docker build -t ghcr.io/example/gleaner:0.1.0 .
# Other extras: docker build --build-arg EXTRAS=train-gpu,vllm ...
FROM python:3.11-slim

ARG EXTRAS=train-gpu
WORKDIR /root
ENV PYTHONPATH=/root \
    PYTHONUNBUFFERED=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    DO_NOT_TRACK=1

# Dependencies first, so that a change of the code does not install them again.
COPY pyproject.toml constraints.txt README.md LICENSE gleaner.py /root/
COPY resources/__init__.py /root/resources/
COPY storage/__init__.py /root/storage/
COPY tasks /root/tasks
COPY workflows/__init__.py /root/workflows/
RUN pip install --no-cache-dir 'pip==26.3' \
    && pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --yes gleaner

COPY . /root
