"""The queue against a list that is searched whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.waiting import WaitingQueue
from tests.runtime.test_scheduler import request

PRIORITIES = st.integers(-2, 2)


@given(data=st.data())
@settings(max_examples=100)
def test_order(data: st.DataObject) -> None:
    queue, waiting, short, now = WaitingQueue(), list[Request](), set[Request](), 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["push", "push", "push", "pop", "pop short", "cancel", "late"]))
        if action == "push":
            one = request([1], 1, priority=data.draw(PRIORITIES), deadline=data.draw(st.none() | st.integers(0, 30)))
            waiting.append(one)
            if data.draw(st.booleans()):
                short.add(one)
            queue.push(one, is_short=one in short)
        elif action == "pop" and waiting:
            first = min(waiting, key=lambda one: one.priority)
            assert queue.first is queue.pop() is first
            waiting.remove(first)
        elif action == "pop short":
            highest, still = data.draw(PRIORITIES), {one for one in waiting if data.draw(st.booleans())}
            expected = None
            for one in sorted(waiting, key=lambda one: one.priority):
                if one in short and one.priority <= highest and expected is None:
                    expected = one if one in still else None
                    short -= {one} - still
            assert queue.pop_short(highest, still.__contains__) is expected
            if expected is not None:
                waiting.remove(expected)
        elif action == "cancel" and waiting:
            data.draw(st.sampled_from(waiting)).finish_reason = "cancelled"
        elif action == "late":
            now += data.draw(st.integers(0, 9))
            late = [one for one in waiting if one.deadline is not None and now >= one.deadline]
            assert queue.has_late(now) or not late
            ended = {one for one in waiting if one.finish_reason is not None} | set(late)
            assert set(queue.remove_ended(now)) == ended
            assert all(one.finish_reason == "deadline" or one not in late for one in ended) or short is not None
            waiting = [one for one in waiting if one not in ended]
            assert not queue.has_late(now)
        assert len(queue) == len(waiting)
