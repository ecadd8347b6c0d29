"""What ``python -m sglang.launch_server`` is in the images of these tests: the parts of SGLang that a pod shows.

It stops where SGLang stops without FlashInfer's module, answers on HTTP, has a scheduler of its own, and ends on
SIGTERM after FAKE_DRAIN seconds. Standard library only: it runs with the image's Python.
"""

import argparse
import http.server
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time


def check_mamba(backend):
    """SGLang's own words, whatever the cause."""
    if backend != "flashinfer":
        return
    found = os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE", "true").lower() in ("true", "1")
    try:
        if found:
            importlib.import_module("flashinfer.mamba")
    except (ImportError, AttributeError):
        found = False
    if not found:
        raise ValueError("FlashInfer mamba module not available, please check the FlashInfer installation.")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--mamba-backend", default="triton")
    parser.add_argument("--api-key")
    options = parser.parse_known_args()[0]
    check_mamba(options.mamba_backend)
    info = {
        "version": "0.5.16",
        "tp_size": options.tp,
        "attention_backend": options.attention_backend,
        "mamba_backend": options.mamba_backend,
        "device": "cuda",
        "api_key": options.api_key,
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answers = {"/server_info": info, "/model_info": {"model_path": options.model_path}, "/health": {}}
            body = answers.get(self.path)
            data = json.dumps(body).encode()
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    # As with SGLang, it is there before anything listens.
    scheduler = subprocess.Popen(["sglang::scheduler", "-c", "import time; time.sleep(1e6)"], executable=sys.executable)
    server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)

    def end(*_what):
        print("server: SIGTERM", flush=True)
        time.sleep(float(os.environ.get("FAKE_DRAIN", "0")))
        scheduler.kill()
        scheduler.wait()
        print("server: ended", flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    print("The server is fired up and ready to roll!", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


main()
