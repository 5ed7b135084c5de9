"""Other servers of the same network: a bare one here, and peers in environments of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

BARE = """\
import sys, orjson, torch, uvicorn, dni_runtime
torch.set_num_threads(1)
network = dni_runtime.load(sys.argv[1])

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    (tensor,) = orjson.loads(body)["inputs"]
    x = torch.tensor(tensor["data"]).reshape(tensor["shape"])
    with torch.no_grad():
        y = network(x)
    output = {"name": "output", "datatype": "FP32", "shape": list(y.shape)}
    output["data"] = y.flatten().tolist()
    data = orjson.dumps({"outputs": [output]})
    await send({"type": "http.response.start", "status": 200, "headers": [
        (b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]})
    await send({"type": "http.response.body", "body": data})

uvicorn.run(app, port=int(sys.argv[2]), loop="uvloop", http="httptools", log_level="critical")
"""
LITSERVE = """\
import sys, torch, litserve
torch.set_num_threads(1)
network = torch.jit.load(sys.argv[1])

class Api(litserve.LitAPI):
    def setup(self, device):
        self.network = network.eval()
    def decode_request(self, request):
        (tensor,) = request["inputs"]
        return torch.tensor(tensor["data"]).reshape(tensor["shape"])[0]
    def batch(self, inputs):
        return torch.stack(inputs)
    def predict(self, x):
        with torch.no_grad():
            return self.network(x)
    def unbatch(self, output):
        return list(output)
    def encode_response(self, output):
        tensor = {"name": "output", "datatype": "FP32", "shape": [1, 10], "data": output.tolist()}
        return {"outputs": [tensor]}

if __name__ == "__main__":
    api = Api(max_batch_size=64, batch_timeout=0.0, api_path="/v2/models/digits/infer")
    server, port = litserve.LitServer(api, accelerator="cpu"), int(sys.argv[2])
    server.run(port=port, generate_client_file=False, log_level="critical")
"""
MLSERVER = """\
import torch
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

class Network(MLModel):
    async def load(self):
        torch.set_num_threads(1)
        self.network = torch.jit.load(self.settings.parameters.uri).eval()
        return True
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = torch.from_numpy(NumpyCodec.decode_input(payload.inputs[0])).float()
        with torch.no_grad():
            y = self.network(x)
        output = NumpyCodec.encode_output("output", y.numpy())
        return InferenceResponse(model_name=self.name, outputs=[output])
"""


@contextmanager
def serving_others(folder: Path, peers: dict[str, str], body: bytes) -> Iterator[dict[str, str]]:
    """Serve a folder's network by a bare server and by these peers; gives their addresses."""
    (folder / "bare.py").write_text(BARE)
    (folder / "lit.py").write_text(LITSERVE)
    argv = [sys.executable, "bare.py", "model.safetensors", "8731"]
    with ExitStack() as stack:
        urls = {"bare uvicorn": stack.enter_context(_program(argv, folder, 8731, body))}
        if "litserve" in peers:
            argv = [f"{peers['litserve']}/bin/python", "lit.py", "model.ts", "8732"]
            urls["LitServe"] = stack.enter_context(_program(argv, folder, 8732, body))
        if "mlserver" in peers:
            _write_mlserver(folder)
            argv = [f"{peers['mlserver']}/bin/mlserver", "start", "."]
            urls["MLServer"] = stack.enter_context(_program(argv, folder / "ml", 8733, body))
        yield urls


@contextmanager
def _program(argv: list[str], folder: Path, port: int, body: bytes) -> Iterator[str]:
    """Run a server of somebody else's until it listens."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        argv, cwd=folder, env=environ, stdout=quiet, stderr=quiet, start_new_session=True
    )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 90
    try:
        while time.monotonic() < until and process.poll() is None:
            if _answers(url, body):
                yield url
                return
            time.sleep(0.5)
        sys.exit(f"{argv[:3]} does not answer")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str, body: bytes) -> bool:
    headers = {"content-type": "application/json"}
    try:
        with urlopen(Request(f"{url}/v2/models/digits/infer", body, headers), timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _write_mlserver(folder: Path) -> None:
    (folder / "ml").mkdir()
    (folder / "ml" / "network.py").write_text(MLSERVER)
    settings = {
        "http_port": 8733,
        "grpc_port": 8734,
        "metrics_port": 8735,
        "parallel_workers": 0,
        "debug": False,
    }
    (folder / "ml" / "settings.json").write_text(json.dumps(settings))
    model = {
        "name": "digits", "implementation": "network.Network",
        "max_batch_size": 64, "max_batch_time": 0.001,
        "parameters": {"uri": str(folder / "model.ts")},
    }  # fmt: skip
    (folder / "ml" / "model-settings.json").write_text(json.dumps(model))
