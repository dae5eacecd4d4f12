"""The page in a browser, against a real server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.window import FixedWindow
from tests.conftest import TINY, Engines, build_pair
from tests.serving.running_server import RunningServer, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MESSAGE = "Copy: three wooden hare wooden sailor mill strange café."
"""Answered in a dozen tokens."""
DIARY = "Write the diary of Bruno the teacher, who seeks the golden boat. Begin on Saturday in the market."

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
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=60_000)
    text = page.locator(".numbers").last.text_content() or ""
    length, tokens = re.match(r"acceptance length ([\d.]+) ", text), re.search(r" (\d+) tokens?\b(?!/)", text)
    assert length and tokens, text
    return float(length[1]), int(tokens[1])


def notes(page: Page) -> list[str]:
    """What stands below the numbers of the last answer."""
    return page.locator(".answer").last.locator(".note").all_text_contents()


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
    page.get_by_role("button", name="Send", exact=True).click()
    numbers(page)
    second = answer(server, MESSAGE, first, "And then?")["choices"][0]["message"]["content"]
    assert page.locator(".answer .text").all_text_contents() == [first, second]
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".answer")).to_have_count(0)


def test_without_speculation_nothing_is_drafted(page: Page, server: RunningServer) -> None:
    send(page, MESSAGE)
    numbers(page)
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Verify window").select_option("1")
    send(page, MESSAGE)
    length, tokens = numbers(page)
    assert notes(page) == ["No draft tokens: you chose a verify window of 1, which is no speculation."]
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
    assert notes(page) == ["Cut at 5 tokens, your max tokens."]


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_can_be_stopped(page: Page, server: RunningServer, how: str) -> None:
    page.route("**/v1/chat/completions", never_ending)
    page.get_by_label("Verify window").select_option("1")
    page.get_by_label("Max tokens").fill("480")
    send(page, MESSAGE)
    page.locator(".answer .target").nth(3).wait_for()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    _, tokens = numbers(page)
    assert tokens < 480 and notes(page)[0] == "Stopped by you."
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
        expect(page.get_by_role("alert")).to_have_text(
            "the API key is missing or wrong. Enter one that this server was started with, and send again."
        )
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Message").press("Enter")
        assert numbers(page)[1] > 0


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_a_screen_shows_all_of_it(browser: Browser, server: RunningServer, width: int) -> None:
    with browser.new_page(viewport={"width": width, "height": 640}) as page:
        page.goto(server.url)
        for words in page.locator(".legend span").all():
            box = words.bounding_box()
            assert box and box["height"] < 40  # one line
        require_nothing_sideways(page)
        send(page, MESSAGE)
        numbers(page)
        require_nothing_sideways(page)
        page.get_by_text("What the numbers mean").click()
        require_nothing_sideways(page)
        for control in (page.get_by_label("Message"), page.get_by_role("button", name="Send", exact=True)):
            expect(control).to_be_in_viewport(ratio=1)


def require_nothing_sideways(page: Page) -> None:
    """See that nothing on the page can be scrolled to the side."""
    wide = page.evaluate(
        "[...document.querySelectorAll('html, body *:not(.unseen, input)')]"
        ".filter(e => e.checkVisibility() && e.clientWidth && e.scrollWidth > e.clientWidth)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((each) => each / 255).map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : colour;
  };
  const found = {};
  for (const element of document.querySelectorAll("body *:not(script):not(:disabled)")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!(says || element.placeholder || element.value) || !element.checkVisibility()) continue;
    const style = getComputedStyle(element, element.placeholder && !element.value ? "::placeholder" : null);
    const [one, other] = [luminance(style.color), luminance(behind(element))];
    const name = element.tagName + "." + (element.className || element.id);
    found[name] = Math.min(found[name] ?? 21, (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05));
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(browser: Browser, server: RunningServer, scheme: Any) -> None:
    """By WCAG 2's measure, 4.5 to 1 at the least."""
    with browser.new_page(color_scheme=scheme) as page:
        page.goto(server.url)
        page.get_by_text("What the numbers mean").click()
        found = [page.evaluate(CONTRASTS)]
        with server.paused():
            send(page, MESSAGE)
            page.locator(".waiting").wait_for()
            found.append(page.evaluate(CONTRASTS))
        numbers(page)
        page.get_by_label("Max tokens").fill("5")
        send(page, "long " * 600)
        page.get_by_role("alert").wait_for()
        found.append(page.evaluate(CONTRASTS))
        low = {name: ratio for each in found for name, ratio in each.items() if ratio < 4.5}
        assert low == {}
        names = {name for each in found for name in each}
        wanted = ("SPAN.draft", "SPAN.target", "P.waiting", "P.error", "TEXTAREA.message", "SUMMARY.", "B.", "DD.")
        assert all(any(name.startswith(want) for name in names) for want in wanted), names


def test_what_the_numbers_mean_is_told_without_a_mouse(page: Page) -> None:
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    send(page, MESSAGE)
    numbers(page)
    explained = [term.lower() for term in page.locator("#help dt:visible").all_text_contents()]
    shown = re.sub(r"[\d.]+( m?s)?", "", page.locator(".numbers").text_content() or "")
    for name in ("acceptance length", "tokens/s", "ttft", "itl", "verify window"):
        assert name in explained and name in shown.lower()
    assert page.locator("#block_size").inner_text() == "8"
    assert page.locator("[title]").count() == 0


def test_the_focus_can_be_seen(page: Page) -> None:
    seen = set()
    page.locator("summary").focus()
    for _ in range(14):
        page.keyboard.press("Tab")
        where, style = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e === document.body ? '' : e.id || e.textContent, s.outlineStyle + s.outlineWidth]; }"
        )
        seen.add(where)
        assert not where or style == "solid2px", where
    assert {"message", "send", "window", "temperature", "max_tokens", "clear", MESSAGE} <= seen


class NeverWorthIt:
    """As an adaptive window where passes over more rows take too long: one draft token in `every` passes, or none."""

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._passes = 0

    def choose(self, requests: Sequence[Request]) -> list[int]:
        self._passes += 1
        window = 1 if self._every is None or self._passes % self._every else 2
        return [min(request.verify_window or window, request.remaining) for request in requests]

    def observe(self, *_: object) -> None:
        """Nothing to learn."""


@pytest.mark.parametrize(
    ("policy", "settings", "told"),
    [
        (
            NeverWorthIt(),
            {},
            "No draft tokens: the server now verifies 1 token a pass, because drafting would be slower on this machine. "
            "Choose a verify window of 2 or more to see draft tokens.",
        ),
        (
            NeverWorthIt(every=6),
            {},
            r"\d+ of \d+ passes had draft tokens. In the others the server verified 1 token, because drafting would have "
            "been slower on this machine.",
        ),
        (
            FixedWindow(1),
            {"verify_window": 1},
            "No draft tokens: this server was started with a verify window of 1. "
            "Choose a verify window of 2 or more to see draft tokens.",
        ),
        (FixedWindow(4), {"verify_window": 4}, None),
    ],
)
def test_it_says_why_no_draft_token_is_shown(
    browser: Browser,
    alone: LLM,
    monkeypatch: pytest.MonkeyPatch,
    policy: Any,
    settings: dict[str, Any],
    told: str | None,
) -> None:
    monkeypatch.setattr(alone, "windows", lambda window: policy)
    with running(alone, **settings) as server, browser.new_page() as page:
        page.goto(server.url)
        page.get_by_label("Max tokens").fill("40")
        send(page, DIARY)
        numbers(page)
        cut, *others = notes(page)
        assert cut == "Cut at 40 tokens, your max tokens."
        assert [re.fullmatch(told or "", note) is not None for note in others] == [True] * (told is not None), others
        if told is None:
            assert page.locator(".answer .draft").count() > 0


def test_it_says_why_before_a_long_answer_ends(browser: Browser, alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "windows", lambda window: NeverWorthIt())
    with running(alone) as server, browser.new_page() as page:
        page.goto(server.url)
        page.route("**/v1/chat/completions", never_ending)
        page.get_by_label("Max tokens").fill("480")
        send(page, MESSAGE)
        expect(page.locator(".note")).to_have_text(
            re.compile("No draft tokens: the server now verifies 1 token a pass")
        )
        expect(page.get_by_role("status")).to_have_text("Answering. Esc or Stop ends it.")
        page.keyboard.press("Escape")
        numbers(page)
        assert [note.split(":")[0] for note in notes(page)] == ["Stopped by you.", "No draft tokens"]


def test_a_verify_window_can_be_chosen(page: Page, browser: Browser, alone: LLM) -> None:
    options = page.get_by_label("Verify window").locator("option")
    assert options.all_text_contents() == ["default (8)", "off (1)", *"2345678"]
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, MESSAGE)
    assert "verify_window" not in sent.value.post_data_json
    numbers(page)
    assert "verify window 8" in (page.locator(".numbers").text_content() or "")
    page.get_by_label("Verify window").select_option("4")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, MESSAGE)
    assert sent.value.post_data_json["verify_window"] == 4
    numbers(page)
    assert "verify window 4" in (page.locator(".numbers").last.text_content() or "")
    with running(alone) as adaptive, browser.new_page() as other:
        other.goto(adaptive.url)
        assert other.get_by_label("Verify window").locator("option").first.text_content() == "auto"


def test_the_wait_for_the_first_token_is_shown(page: Page, server: RunningServer) -> None:
    with server.paused():
        busy = server.connect("/v1/completions", prompt="Saturday", max_tokens=1)
        send(page, MESSAGE)
        expect(page.locator(".waiting")).to_have_text("waiting for the first token")
        expect(page.get_by_role("status")).to_have_text("Answering. Esc or Stop ends it.")
        expect(page.locator(".waiting")).to_have_text(
            re.compile(r"waiting for the first token, \d+ s; the server has 1 other request")
        )
    numbers(page)
    busy.close()
    expect(page.locator(".waiting")).to_have_count(0)
    assert re.search(r"TTFT [1-9]\d*\.\d\d s", page.locator(".numbers").text_content() or "")


def test_a_wait_can_be_stopped_and_no_text_is_lost(page: Page, server: RunningServer) -> None:
    with server.paused():
        send(page, MESSAGE)
        page.get_by_label("Message").fill("And then?")
        page.keyboard.press("Escape")
        expect(page.get_by_role("status")).to_have_text("Stopped before the first token. Your message is back.")
    expect(page.get_by_label("Message")).to_have_value(f"{MESSAGE}\nAnd then?")
    expect(page.locator(".user")).to_have_count(0)
    expect(page.locator("#prompts button").first).to_be_visible()


def test_enter_while_an_answer_comes_says_what_it_waits_for(page: Page) -> None:
    page.route("**/v1/chat/completions", never_ending)
    page.get_by_label("Max tokens").fill("480")
    page.get_by_label("Verify window").select_option("1")
    send(page, MESSAGE)
    page.locator(".answer .target").nth(3).wait_for()
    send(page, "And then?")
    expect(page.get_by_role("status")).to_have_text(
        "Still answering. Your text stays here. Esc or Stop ends the answer, then Enter sends."
    )
    expect(page.get_by_label("Message")).to_have_value("And then?")
    expect(page.locator(".user")).to_have_count(1)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send", exact=True).wait_for()
    page.get_by_label("Max tokens").fill("5")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".user")).to_have_count(2)
    numbers(page)


def test_enter_with_nothing_to_send_says_so(page: Page) -> None:
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("status")).to_have_text("Write something first.")


def test_shift_and_enter_make_a_new_line(page: Page) -> None:
    page.get_by_label("Message").fill("one")
    page.get_by_label("Message").press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.get_by_label("Message")).to_have_value("one\ntwo")
    expect(page.locator(".user")).to_have_count(0)


def test_prompts_of_the_drafters_kind_are_offered(page: Page) -> None:
    lines = (TINY / "drafter/example_prompts.txt").read_text().splitlines()
    assert page.locator("#prompts button").all_text_contents() == lines
    page.locator("#prompts button").nth(1).click()
    numbers(page)
    assert page.locator(".user").inner_text() == lines[1]
    expect(page.locator("#empty")).to_be_hidden()


@pytest.mark.parametrize("clipboard", ["allowed", "missing"])
def test_an_answer_is_copied(browser: Browser, server: RunningServer, clipboard: str) -> None:
    """A page that came over plain HTTP from another machine has no `navigator.clipboard`."""
    with browser.new_context(permissions=["clipboard-read", "clipboard-write"]) as context:
        if clipboard == "missing":
            context.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page = context.new_page()
        page.goto(server.url)
        send(page, MESSAGE)
        numbers(page)
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_focused()
        page.get_by_label("Message").fill("")
        page.get_by_label("Message").press("Control+v")
        expect(page.get_by_label("Message")).to_have_value(page.locator(".answer .text").text_content() or "")


def test_an_answer_is_read_out_once_it_is_whole(page: Page, server: RunningServer) -> None:
    with server.paused():
        send(page, MESSAGE)
        expect(page.locator("#said")).to_have_text("")
    numbers(page)
    expect(page.locator("#said")).to_have_text(page.locator(".answer .text").text_content() or "")
    assert page.locator("#log").evaluate("e => e.closest('[aria-live], [role=log], [role=status]')") is None


def cut_stream(route: Route) -> None:
    """The beginning of an answer and no end."""
    choice = {"delta": {"content": "This"}, "token_sources": [{"text": "This", "drafted": False}]}
    route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps({'choices': [choice]})}\n\n")


def test_errors_say_what_to_do(page: Page) -> None:
    alert = page.get_by_role("alert")
    send(page, "long " * 600)
    expect(alert).to_contain_text("tokens")
    expect(alert).to_contain_text("Shorten the message, or start a new chat.")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_label("Message").fill("")
    send(page, MESSAGE)
    expect(alert).to_have_text("The server cannot be reached. Send again once it runs.")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", cut_stream)
    page.get_by_label("Message").press("Enter")
    expect(alert).to_have_text("The connection ended before the answer did. Send again.")
    assert page.locator(".answer .text").text_content() == "This" and notes(page) == ["Cut off by an error."]


def test_a_model_without_a_chat_template_continues_texts(browser: Browser, tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        kept = shutil.ignore_patterns("chat_template.jinja", "example_prompts.txt")
        shutil.copytree(TINY / name, tmp_path / name, ignore=kept)
    llm = build_pair(tmp_path / "engine", tmp_path / "target", tmp_path / "drafter")
    with running(llm) as server, browser.new_page() as page:
        page.goto(server.url)
        expect(page.get_by_text("This model has no chat template")).to_be_visible()
        assert page.locator("#prompts button").first.text_content() == "def fibonacci(n):"
        page.get_by_label("Max tokens").fill("40")
        send(page, MESSAGE + "\n")
        numbers(page)
        expected = server.post("/v1/completions", prompt=MESSAGE + "\n", temperature=0, max_tokens=40).json()
        assert page.locator(".answer .text").text_content() == expected["choices"][0]["text"]


def test_what_an_engine_says_cannot_end_the_script(alone: LLM) -> None:
    name = "</script><script>alert(1)</script><!--"
    with running(alone, model_name=name) as server:
        (told,) = re.findall(r'id="engine">(.*?)</script>', server.http.get("/").text)
    assert json.loads(told)["model"] == name and "<" not in told


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
        "chunks => { const answer = new Answer(null); chunks.forEach((chunk) => answer.take(chunk)); }",
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
