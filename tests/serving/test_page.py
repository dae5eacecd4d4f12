"""The page in a browser, against a real server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.conftest import TINY, Engines, build_pair
from tests.serving.running_server import RunningServer, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MESSAGE = "Write the diary of Bruno the teacher, who seeks the golden boat. Begin on Saturday in the market."

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def server(llms: Engines) -> Iterator[RunningServer]:
    # With a fixed window the same tokens are drafted each time.
    with running(llms["tiny"], verify_window=llms["tiny"].executor.max_window) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    with browser.new_page() as page:
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda said: complaints.append(said.text) if "Content Security Policy" in said.text else None
        )
        page.goto(server.url)
        yield page
        assert complaints == []


def send(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answer(server: RunningServer, *messages: str, **body: Any) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
    response = server.post("/v1/chat/completions", messages=turns, temperature=0, max_tokens=256, **body)
    assert response.status_code == 200
    return dict(response.json())


def never_ending(route: Route) -> None:
    """Sends what the page asks for on, with no token that ends the answer before its limit."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


def numbers(page: Page) -> tuple[float, int]:
    """Acceptance length and tokens of the last answer, once it is whole."""
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    found = re.match(
        r"acceptance length ([\d.]+) · [\d.]+ tokens/s · (\d+) tokens", page.locator(".numbers").last.inner_text()
    )
    assert found
    return float(found[1]), int(found[2])


def test_an_answer_is_what_the_api_gives_and_shows_how_its_tokens_came(page: Page, server: RunningServer) -> None:
    expected = answer(server, MESSAGE, return_speculation=True, return_token_sources=True)
    send(page, MESSAGE)
    length, tokens = numbers(page)
    text = expected["choices"][0]["message"]["content"]
    assert page.locator(".answer .text").text_content() == text
    assert page.locator(".user").inner_text() == MESSAGE
    assert length == round(expected["speculation"]["mean_acceptance_length"], 2) > 1
    assert tokens == expected["usage"]["completion_tokens"]
    for name, drafted in (("draft", True), ("target", False)):
        sources = [each["text"] for each in expected["choices"][0]["token_sources"] if each["drafted"] is drafted]
        shown = page.locator(f".answer .text .{name}").all_text_contents()
        assert shown == [each for each in sources if each] != []
        colours = {
            page.locator(f"{place} .{name}").first.evaluate("element => getComputedStyle(element).backgroundColor")
            for place in (".answer", ".legend")
        }
        assert len(colours) == 1 and "rgba(0, 0, 0, 0)" not in colours


def test_a_conversation_goes_on(page: Page, server: RunningServer) -> None:
    send(page, MESSAGE)
    numbers(page)
    first = answer(server, MESSAGE)["choices"][0]["message"]["content"]
    page.get_by_label("Message").fill("And then?")
    page.get_by_role("button", name="Send").click()
    numbers(page)
    second = answer(server, MESSAGE, first, "And then?")["choices"][0]["message"]["content"]
    assert page.locator(".answer .text").all_text_contents() == [first, second]
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".answer")).to_have_count(0)


def test_without_speculation_nothing_is_drafted(page: Page, server: RunningServer) -> None:
    send(page, MESSAGE)
    numbers(page)
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Speculation").uncheck()
    send(page, MESSAGE)
    length, tokens = numbers(page)
    assert length == 1 and tokens > 10
    assert page.locator(".answer .draft").count() == 0 < page.locator(".answer .target").count()
    assert page.locator(".answer .text").text_content() == answer(server, MESSAGE)["choices"][0]["message"]["content"]


def test_fields_are_sent(page: Page) -> None:
    page.get_by_label("Max tokens").fill("5")
    page.get_by_label("Temperature").fill("1.5")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, MESSAGE)
    assert sent.value.post_data_json["temperature"] == 1.5 and sent.value.post_data_json["model"] == "tiny"
    assert numbers(page)[1] == 5
    assert page.locator(".numbers").inner_text().endswith("5 tokens, cut at the limit")


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_can_be_stopped(page: Page, server: RunningServer, how: str) -> None:
    page.route("**/v1/chat/completions", never_ending)
    page.get_by_label("Speculation").uncheck()
    page.get_by_label("Max tokens").fill("480")
    send(page, MESSAGE)
    page.locator(".answer .target").nth(3).wait_for()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    _, tokens = numbers(page)
    assert tokens < 480 and page.locator(".numbers").inner_text().endswith(", stopped")
    expect(page.locator(".error")).to_have_count(0)


def test_a_refusal_is_shown_and_the_message_is_kept(page: Page) -> None:
    page.get_by_label("Temperature").fill("-1")
    page.evaluate("document.getElementById('form').noValidate = true")
    send(page, MESSAGE)
    expect(page.get_by_role("alert")).to_contain_text("temperature")
    expect(page.get_by_label("Message")).to_have_value(MESSAGE)
    expect(page.locator(".user")).to_have_count(0)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message").press("Enter")
    numbers(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_markup_is_text(page: Page) -> None:
    markup = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"
    send(page, markup)
    numbers(page)
    assert page.locator(".user").inner_text() == markup
    assert page.locator("main img, main .user b").count() == 0
    assert page.title() == "dflash-trt"


def test_a_key_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    llm = build_pair(tmp_path / "engine", TINY / "target", TINY / "drafter")
    with running(llm, api_keys=("secret",)) as locked, browser.new_page() as page:
        page.goto(locked.url)
        expect(page.get_by_label("API key")).to_be_visible()
        page.get_by_label("Max tokens").fill("5")
        send(page, "Hi")
        expect(page.get_by_role("alert")).to_contain_text("API key")
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Message").press("Enter")
        assert numbers(page)[1] > 0


def test_a_phone_shows_all_of_it(browser: Browser, server: RunningServer) -> None:
    with browser.new_page(viewport={"width": 360, "height": 640}) as page:
        page.goto(server.url)
        send(page, MESSAGE)
        numbers(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        for control in (page.get_by_label("Message"), page.get_by_role("button", name="Send")):
            expect(control).to_be_in_viewport(ratio=1)


def test_the_page_asks_no_other_host(server: RunningServer) -> None:
    response = server.http.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(r"https?://|@import|url\(", response.text)


def test_reasoning_stands_apart_and_tags_are_not_shown(page: Page) -> None:
    chunks = [
        ({"reasoning": "hm"}, [("<think>", False), ("\n", True), ("hm", True)]),
        ({"content": "y"}, [("\n</th", False), ("ink>", True), ("\n\ny", False)]),
        ({"content": "es"}, [("es", True)]),
    ]
    page.evaluate(
        "chunks => { const answer = new Answer(); chunks.forEach((chunk) => answer.take(chunk)); }",
        [
            {
                "choices": [
                    {"delta": delta, "token_sources": [{"text": text, "drafted": drafted} for text, drafted in tokens]}
                ]
            }
            for delta, tokens in chunks
        ],
    )
    assert page.locator("details .draft").all_text_contents() == ["hm"]
    assert page.locator(".answer > .text .target").all_text_contents() == ["y"]
    assert page.locator(".answer > .text .draft").all_text_contents() == ["es"]
