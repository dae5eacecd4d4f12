"""Serves SmolLM2 and its drafter, talks to it on the page at /, and keeps that as docs/page.png of the README.

python docs/page.py ENGINE_DIR, the one that `dflash-trt demo` writes
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import uvicorn
from playwright.sync_api import sync_playwright

from dflash_trt import LLM
from dflash_trt.serving.app import create_app
from dflash_trt.serving.server import bind
from dflash_trt.serving.settings import ServerSettings

MESSAGES = ("Write a Python function that reverses a string.", "Now make it reverse a list.")
SIZE = {"width": 860, "height": 860}

llm = LLM(sys.argv[1], device="cpu")
app = create_app(llm, ServerSettings(model_name="smollm2-135m"))
with bind("127.0.0.1", 0) as bound, sync_playwright() as playwright:
    bound.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = threading.Thread(target=lambda: server.run(sockets=[bound]))
    serving.start()
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport=SIZE, device_scale_factor=1.5)
    page.goto(f"http://127.0.0.1:{bound.getsockname()[1]}")
    page.get_by_label("Max tokens").fill("120")
    page.get_by_label("Verify window").select_option("3")  # on a busy machine "auto" may draft nothing
    for message in MESSAGES:
        page.get_by_label("Message").fill(message)
        page.get_by_label("Message").press("Enter")
        page.get_by_role("button", name="Send", exact=True).wait_for(timeout=300_000)
    page.screenshot(path=str(Path(__file__).with_name("page.png")))
    browser.close()
    server.should_exit = True
    serving.join()
