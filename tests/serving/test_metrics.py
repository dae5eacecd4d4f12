"""Metrics: readable by Prometheus, and true."""

from __future__ import annotations

from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Engines
from tests.serving.running_server import MESSAGES, RunningServer, running

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

NAMES = {
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_success_total",
}


def samples(server: RunningServer) -> Samples:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            key = sample.name, tuple(sorted(labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_counts_are_those_of_the_answers(llms: Engines) -> None:
    with running(llms["tiny"]) as server:
        answers = [
            server.post(
                "/v1/chat/completions",
                messages=MESSAGES,
                max_tokens=30,
                temperature=0,
                n=n,
                verify_window=8,
                return_speculation=True,
            ).json()
            for n in (1, 2)
        ]
        found = samples(server)
    assert {name for name, _ in found} >= {f"dflash_trt:{name}" for name in NAMES}

    def value(name: str, **labels: str) -> float:
        return found[f"dflash_trt:{name}", tuple(sorted(labels.items()))]

    usages, told = [answer["usage"] for answer in answers], [answer["speculation"] for answer in answers]
    completions = sum(usage["completion_tokens"] for usage in usages)
    assert value("generation_tokens_total") == completions
    assert value("prompt_tokens_total") == 3 * usages[0]["prompt_tokens"]
    assert value("spec_decode_num_drafts_total") == sum(each["num_spec_steps"] for each in told)
    assert value("spec_decode_num_draft_tokens_total") == sum(each["num_draft_tokens"] for each in told)
    accepted = value("spec_decode_num_accepted_tokens_total")
    assert accepted == sum(each["num_accepted_draft_tokens"] for each in told) > 0
    by_place = {
        int(dict(labels)["position"]): count
        for (name, labels), count in found.items()
        if name == "dflash_trt:spec_decode_num_accepted_tokens_per_pos_total"
    }
    assert sum(by_place.values()) == accepted
    assert [by_place[place] for place in range(len(by_place))] == sorted(by_place.values(), reverse=True)
    assert value("time_to_first_token_seconds_count") == value("e2e_request_latency_seconds_count") == 3
    assert value("inter_token_latency_seconds_count") == completions - 3
    assert value("request_success_total", finished_reason="length") == 3
    assert value("prefix_cache_queries_total") == 3 * usages[0]["prompt_tokens"]
    assert value("prefix_cache_hits_total") > 0
    assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0


def test_windows_are_those_of_passes_that_verified(llms: Engines) -> None:
    """Not of those that ended a prompt, and chose its first token."""
    counts, sums = [0.0], [0.0]
    with running(llms["tiny"]) as server:
        for window, max_tokens in ((8, 1), (3, 40), (1, 5)):
            body = {"prompt": "Saturday", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
            assert server.post("/v1/completions", **body, verify_window=window).status_code == 200
            found = samples(server)
            counts.append(found["dflash_trt:verify_window_tokens_count", ()])
            sums.append(found["dflash_trt:verify_window_tokens_sum", ()])
    none, threes, ones = (after - before for before, after in pairwise(counts))
    assert none == 0 and 39 / 3 <= threes < 39 and ones == 4
    assert 3 * (threes - 2) < sums[2] < 3 * threes, "the last two have room for fewer, no others"
    assert sums[3] - sums[2] == 4


def test_what_is_under_way_shows(llms: Engines) -> None:
    with running(llms["tiny"]) as server:
        body = {"prompt": "Saturday", "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 24}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # which takes the connection with it where nothing holds it
            next(lines)
            found = samples(server)
        requests = found["dflash_trt:num_requests_running", ()], found["dflash_trt:num_requests_waiting", ()]
        assert 1 <= requests[0] <= 8 and sum(requests) == 24
        assert 0 < found["dflash_trt:kv_cache_usage_perc", ()] <= 1


def test_vllms_names(llms: Engines) -> None:
    with running(llms["tiny"], vllm_metrics=True) as server:
        server.post("/v1/completions", prompt="Saturday", max_tokens=20)
        found = samples(server)
    ours = {(name.partition(":")[2], labels): value for (name, labels), value in found.items() if name[0] == "d"}
    theirs = {(name.partition(":")[2], labels): value for (name, labels), value in found.items() if name[0] == "v"}
    assert ours == theirs and len(ours) > len(NAMES)
    with running(llms["tiny"]) as server:
        assert "vllm:" not in server.http.get("/metrics").text
