# The images that tasks run in on a cluster, each with its code; workflows/images.py has the same without. Not built in CI.
#   docker build -t ghcr.io/example/gleaner-train:0.1.0 .
#   docker build --build-arg EXTRAS=control -t ghcr.io/example/gleaner-control:0.1.0 .
FROM python:3.11-slim

ARG EXTRAS=train
WORKDIR /root
ENV PYTHONPATH=/root \
    PYTHONUNBUFFERED=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    DO_NOT_TRACK=1 \
    TRANSFORMERS_NO_ADVISORY_WARNINGS=1

# Triton, by which vLLM and our sampling run on a GPU, compiles its launchers with gcc.
RUN [ "${EXTRAS}" = control ] || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; }

# Dependencies first, so that a change of the code does not install them again.
# Setuptools only asks for the version, and whether the packages that pyproject.toml lists are there.
COPY pyproject.toml constraints.txt README.md LICENSE gleaner.py /root/
COPY build_backend /root/build_backend
COPY storage/package_version.py /root/storage/
RUN python -c "import os, tomllib; listed = tomllib.load(open('pyproject.toml', 'rb'))['tool']['setuptools']; \
    [os.makedirs(package.replace('.', '/'), exist_ok=True) for package in listed['packages']]"
RUN pip install --no-cache-dir 'pip==26.3' \
    && pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]" \
    && rm -r gleaner.egg-info \
    && pip uninstall --yes gleaner

COPY . /root
